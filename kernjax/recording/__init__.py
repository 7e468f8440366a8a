"""The recording on disk: distributions of one producer on one corpus, and what they are made of.

A directory (or `gs://` prefix, or one .zip): `manifest.json`, the zarr3 arrays `ids` and `values`
(plus declared extras) with one chunk a segment, and `complete.json` with the checksums. NumPy and
TensorStore only, no jax.
"""

from kernjax.recording.comparable import check_comparable as check_comparable
from kernjax.recording.files import is_complete as is_complete
from kernjax.recording.manifest import SCHEMA_VERSION as SCHEMA_VERSION
from kernjax.recording.manifest import TOP_K as TOP_K
from kernjax.recording.manifest import build_manifest as build_manifest
from kernjax.recording.manifest import canonical_json as canonical_json
from kernjax.recording.manifest import identity_diff as identity_diff
from kernjax.recording.pack import pack_recording as pack_recording
from kernjax.recording.reader import Recording as Recording
from kernjax.recording.reader import load_recording as load_recording
from kernjax.recording.rows import PHASES as PHASES
from kernjax.recording.writer import RecordingWriter as RecordingWriter
