"""record on many processes: one recording, killed at any moment, equal to that of one process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from instrument import LAYERS, run
from kimi_checkpoints import K3, K3_TEXT, write_k3
from pod_processes import Process, free_port, start, start_pod
from tiny import CONFIG, make_corpus, write_checkpoint

from kernjax import load_recording, record
from kernjax.base.errors import UserError
from kernjax.texts import write_corpus

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

KILLS = int(os.environ.get("KERNJAX_TEST_KILLS", "1"))  # a stress test asks for more
BATCHES = 4

# Two layers that have everything: Kimi delta attention and a dense MLP, latent attention and a
# mixture of experts in MXFP4, attention residuals between them.
TEXT = K3_TEXT | {
    "attn_res_block_size": 1,
    "linear_attn_config": K3_TEXT["linear_attn_config"]
    | {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 2},
    "num_hidden_layers": 2,
    "vocab_size": CONFIG["vocab_size"],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(make_corpus({24: BATCHES}, score_len=4), folder)


@pytest.fixture(scope="module")
def flags(corpus, tmp_path_factory) -> list[str]:
    model = write_checkpoint(tmp_path_factory.mktemp("dense"), **LAYERS)
    return [f"--model={model}", f"--corpus={corpus}", "--batch_size=2"]


@pytest.fixture(scope="module")
def k3(corpus, tmp_path_factory) -> list[str]:
    model = tmp_path_factory.mktemp("k3")
    write_k3(model, config=K3 | {"text_config": TEXT})
    return [f"--model={model}", f"--corpus={corpus}", "--batch_size=2"]


def end(pod: list[Process]) -> list[int]:
    return [process.wait() for process in pod]


def test_every_process_with_a_model_of_its_own(flags, tmp_path):
    """Without a mesh over all: the very recording of one process, bit for bit."""
    assert run(record, *flags, f"--out={tmp_path / 'one'}") == 0
    one = load_recording(tmp_path / "one")
    pod = start_pod("kernjax.record", [*flags, f"--out={tmp_path / 'two'}"], 2)
    assert end(pod) == [0, 0], [process.text for process in pod]
    assert pod[0].result == pod[1].result
    assert pod[0].result["identity"] == load_recording(tmp_path / "two").identity
    assert files(tmp_path / "two") == files(tmp_path / "one")
    # Each logged nothing of the other's batches; only the first one logs at all.
    assert "batch 2/2" in pod[0].text and "batch" not in pod[1].text
    assert one.identity == pod[0].result["identity"]

    # As where a host was lost after the last segment and the cluster starts all of them again.
    again = start_pod("kernjax.record", [*flags, f"--out={tmp_path / 'two'}"], 2)
    assert end(again) == [0, 0], [process.text for process in again]
    assert again[0].result == pod[0].result and "is complete already" in again[0].text
    assert files(tmp_path / "two") == files(tmp_path / "one")
    other = start_pod("kernjax.record", [*flags, "--policy=bf16", f"--out={tmp_path / 'two'}"], 2)
    assert end(other) == [3, 3] and "--overwrite" in other[1].result["error"]


def test_one_model_over_all_processes_killed_and_started_again(flags, tmp_path):
    """Heads in two parts: killed with SIGKILL, started again, and whole only at the end."""
    sharded = [*flags, "--mesh=tensor=2"]
    out = tmp_path / "killed"
    rng = random.Random(KILLS)
    durable: set[str] = set()
    for attempt in range(KILLS):
        pod = start_pod("kernjax.record", [*sharded, f"--out={out}"], 2)
        victim = pod[rng.randrange(2)]
        batch = rng.randint(0, BATCHES - 2)
        if batch:
            pod[0].wait_for(f"batch {batch}/", timeout=240)
        time.sleep(rng.uniform(0, 0.2 if batch else 4))
        # The worker or its guardian: either is a host that is gone.
        pid = victim.worker() if attempt % 2 == 0 else victim.popen.pid
        with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
            os.kill(pid or victim.popen.pid, signal.SIGKILL)
        began = time.monotonic()
        codes = end(pod)
        assert time.monotonic() - began < 60
        if codes == [0, 0]:
            break  # it was through before it was killed
        whole = (out / "complete.json").exists()  # killed after the last segment
        other = pod[1 - pod.index(victim)]
        if other.popen.returncode == 0:
            assert whole  # only the goodbye was interrupted
            continue
        assert other.popen.returncode == 3, other.text
        assert "Traceback" not in other.text
        assert "process" in other.result["error"] and other.result["exit_code"] == 3
        assert other.result["again"] is True
        if whole:
            continue
        with pytest.raises(UserError):
            load_recording(out)
        now = {path.name for path in out.glob("segments/*.json")}
        assert durable <= now, "a segment that was written was lost"
        durable = now
    else:
        pod = start_pod("kernjax.record", [*sharded, f"--out={out}"], 2)
        assert end(pod) == [0, 0], [process.text for process in pod]
    assert not (out / "hosts").exists() and not (out / "segments").exists()

    single = start("kernjax.record", *sharded, f"--out={tmp_path / 'single'}", devices=2)
    assert single.wait() == 0, single.text
    # A sum of two parts has one order, whoever adds them: the very bits of two devices of one.
    assert load_recording(out).identity == single.result["identity"]


def test_k3_over_two_processes_is_that_of_one(k3, tmp_path):
    """Experts in MXFP4, KDA and latent heads in two parts, each in a process of its own.

    The two keep their experts packed, the one has dequantised them at load: the same rows.
    """
    words = [*k3, "--mesh=tensor=2", "--limit=1"]
    packed = "--policy=f32,dequantise=layer"
    pod = start_pod("kernjax.record", [*words, packed, f"--out={tmp_path / 'two'}"], 2)
    assert end(pod) == [0, 0], [process.text for process in pod]
    single = start("kernjax.record", *words, f"--out={tmp_path / 'one'}", devices=2)
    assert single.wait() == 0, single.text
    assert pod[0].result["identity"] != single.result["identity"]  # the policies differ
    two, one = files(tmp_path / "two"), files(tmp_path / "one")
    same = [name for name in one if one[name] == two[name]]
    assert two.keys() == one.keys()
    assert one.keys() - set(same) <= {"manifest.json", "complete.json"}, same


def test_flags_that_differ_end_both(flags, tmp_path):
    words = [*flags, f"--out={tmp_path / 'out'}"]
    pod = start_pod("kernjax.record", words, 2)
    pod[1].popen.kill()
    pod[1].wait()
    address = next(word for word in pod[0].popen.args if word.startswith("--coordinator"))
    late = start("kernjax.record", *words, "--policy=bf16", address, "--num_processes=2",
                 "--process_id=1")  # fmt: skip
    assert end([pod[0], late]) == [3, 3]
    for process in (pod[0], late):
        assert "--policy: absent on process 0, --policy=bf16 on process 1" in process.text
        assert "Start the same command on all hosts." in process.result["error"]
        assert "again" not in process.result
    assert not (tmp_path / "out").exists()


def test_nobody_there(flags, tmp_path):
    """Process 0 alone, and process 1 alone: neither waits longer than it was told."""
    words = [*flags, f"--out={tmp_path / 'out'}", "--join_timeout=3", "--num_processes=2"]
    port = free_port()
    pairs = [("0", f"localhost:{port}"), ("1", "localhost:9")]
    first, second = (
        start("kernjax.record", *words, f"--process_id={index}", f"--coordinator_address={at}")
        for index, at in pairs
    )
    assert end([first, second]) == [3, 3]
    assert f"Process 0 of 2 could not join the others at localhost:{port} within 3 s" in first.text
    assert "The coordinator localhost:9 was not reachable for 3 s" in second.text
    assert "--coordinator_address" in second.result["error"]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
