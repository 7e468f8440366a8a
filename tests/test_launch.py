"""launch/ and configs/recipes/: shell that checks, commands that parse, meshes that fit."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from instrument import LAYERS
from tiny import make_corpus, write_checkpoint

from kernjax import record
from kernjax.model import ModelConfig
from kernjax.texts import write_corpus
from kernjax.weights import check_mesh

ROOT = Path(__file__).resolve().parents[1]
HOST_LOST = ROOT / "launch" / "host_lost.sh"  # runs a command inside a job, and starts none
SCRIPTS = sorted(set((ROOT / "launch").iterdir()) - {HOST_LOST})
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.flags"))
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def shell_of(script: Path) -> str:
    """The script; of a SkyPilot task, what it runs."""
    text = script.read_text(encoding="utf-8")
    if script.suffix == ".sh":
        return text
    block = re.search(r"^run: \|\n((?:  .*\n|\n)+)", text, re.M)
    assert block
    return "#!/usr/bin/env bash\n" + textwrap.dedent(block[1])


def defaults_of(script: Path) -> dict[str, str]:
    """The environment that a SkyPilot task declares; a shell script has its defaults in it."""
    if script.suffix == ".sh":
        return {}
    block = re.search(r"^envs:\n((?:  .*\n)+)", script.read_text(encoding="utf-8"), re.M)
    assert block
    pairs = (line.split(":", 1) for line in block[1].splitlines())
    return {name.strip(): value.strip().strip('"') for name, value in pairs}


def run(script: Path, cwd: Path, *words: str, path: Path | None = None, **env: str):
    search = os.environ["PATH"] if path is None else f"{path}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", shell_of(script), script.name, *words],
        cwd=cwd,
        env=os.environ
        | defaults_of(script)
        | {"PATH": search, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("script", [*SCRIPTS, HOST_LOST], ids=lambda path: path.name)
def test_the_shell_checks(script):
    text = shell_of(script)
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    assert "set -euo pipefail" in text
    checker = [SHELLCHECK, "--shell=bash", "-"] if SHELLCHECK else ["bash", "-n"]
    if script.suffix == ".yaml" and SHELLCHECK:
        checker.insert(1, "--exclude=SC2154")  # its variables come from `envs:`
    done = subprocess.run(checker, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> tuple[Path, Path]:
    """A model and a corpus of two segments."""
    folder = tmp_path_factory.mktemp("case")
    corpus = write_corpus(make_corpus({24: 1}, score_len=4), folder / "corpus")
    return write_checkpoint(folder / "model", **LAYERS), corpus


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_dry_run(script, case, tmp_path):
    """Flags and files are checked here, nothing is started, nothing is written."""
    model, corpus = case
    out = tmp_path / "out"
    more = [f"--corpus={corpus}", "--coordinator_address=auto"]
    environment = {
        "DRY_RUN": "1",
        "MODEL": str(model),
        "OUT": str(out),
        "RECIPE": str(ROOT / "configs/recipes/reference.flags"),
        "FLAGS": shlex.join(more),
    }
    done = run(script, tmp_path, *more, **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"checked": True, "segments": 2}
    assert not out.exists()
    wrong = run(script, tmp_path, *more, **environment | {"RECIPE": "no_such.flags"})
    assert wrong.returncode == 3 and "no_such.flags" in wrong.stderr


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_parse_and_fit_the_27b(recipe):
    record.FLAGS.parse([f"--flagfile={recipe}", "--model=m", "--out=o"])
    try:
        mesh = record.FLAGS["mesh"].value
        assert record.FLAGS["policy"].value == "f32"
    finally:
        record.FLAGS.unparse_flags()
    config = json.loads((ROOT / "configs/models/qwen3.8-27b.json").read_text(encoding="utf-8"))
    if mesh:
        check_mesh(ModelConfig.from_dict(config), mesh)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_default_recipes_exist(script):
    text = script.read_text(encoding="utf-8")
    assert {ROOT / name for name in re.findall(r"configs/recipes/\w+\.flags", text)} <= set(RECIPES)


def command(folder: Path, name: str, body: str) -> None:
    """A stand-in for a program, which notes how it was called in `calls`."""
    path = folder / name
    path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "{folder}/calls"\n{body}\n')
    path.chmod(0o755)


def test_a_slice_that_is_gone_is_made_again_and_a_failure_is_not(tmp_path):
    """READY, lost while it ran, made again, ready, through; then one that ends with 1."""
    gcloud = """
        case "$*" in
        *describe*) state=$(head -n 1 "{0}/states"); sed -i 1d "{0}/states"; echo "$state" ;;
        *ssh*kernjax.record*) code=$(head -n 1 "{0}/codes"); sed -i 1d "{0}/codes"; exit "$code" ;;
        esac"""
    command(tmp_path, "gcloud", textwrap.dedent(gcloud).format(tmp_path))
    script = ROOT / "launch" / "tpu_vm.sh"

    def calls(states: str, codes: str) -> tuple[int, list[str]]:
        (tmp_path / "calls").unlink(missing_ok=True)
        (tmp_path / "states").write_text("\n".join(states.split()) + "\n")
        (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
        done = run(script, ROOT, "--limit=2", path=tmp_path, CACHE="gs://b/x y", SETUP="setup me")
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    code, made = calls("READY PREEMPTED PREEMPTED READY", "255 0")
    assert code == 0
    kinds = [next(k for k in ("describe", "delete", "create", "ssh") if k in call) for call in made]
    assert kinds == ["describe", "ssh", "describe", "describe", "delete", "create", "ssh", "ssh"]
    assert "--worker=all" in made[1] and "--limit=2" in made[1]
    assert r"JAX_COMPILATION_CACHE_DIR=gs://b/x\ y" in made[1]
    assert "setup me" in made[6]

    code, made = calls("READY READY", "1")
    assert code == 1 and len(made) == 3


def test_slurm_tells_every_process_which_one_it_is(tmp_path):
    command(tmp_path, "scontrol", "printf 'node7\\nnode8\\n'")
    command(tmp_path, "srun", f'shift; export SLURM_PROCID=1; "$@" > "{tmp_path}/out"')
    fake = tmp_path / "python"
    fake.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    done = run(
        ROOT / "launch" / "slurm.sh", ROOT, "--limit=1", path=tmp_path, PYTHON=str(fake),
        MODEL="a b", SLURM_JOB_NODELIST="node[7-8]", SLURM_NTASKS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "out").read_text().splitlines()
    assert words[:2] == ["-m", "kernjax.record"] and "--model=a b" in words
    assert words[-4:] == [
        "--limit=1", "--coordinator_address=node7:8476", "--num_processes=2", "--process_id=1",
    ]  # fmt: skip


def test_the_jobset_is_yaml_that_never_retries_a_verdict(tmp_path):
    command(tmp_path, "kubectl", f'cat > "{tmp_path}/manifest"')
    script = ROOT / "launch" / "gke_jobset.sh"
    assert run(script, ROOT, "--policy=bf16,attention.p=m7", path=tmp_path).returncode == 0
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((tmp_path / "manifest").read_text())
    (rule,) = job["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 2, 3]}}
    ]
    assert inner["parallelism"] == inner["completions"] == 8 and inner["backoffLimit"] == 0
    (container,) = inner["template"]["spec"]["containers"]
    assert container["command"][:2] == ["bash", "launch/host_lost.sh"]
    assert container["command"][-1] == "--policy=bf16,attention.p=m7"
    assert inner["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("line", "code", "ends"),
    [
        ('{"exit_code": 3, "error": "lost", "again": true}', 3, 75),
        ('{"exit_code": 3, "error": "bad flag"}', 3, 3),
        ('{"exit_code": 1, "again": true}', 1, 1),
        ("", 0, 0),
    ],
)
def test_a_lost_host_ends_with_a_code_of_its_own(line, code, ends):
    """What the command says comes through; only its last line counts."""
    words = ["bash", str(HOST_LOST), "bash", "-c"]
    said = '{"again": true}\n' + line
    command = f"printf '%s\\n' {shlex.quote(said)}; exit {code}"
    done = subprocess.run([*words, command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (ends, said + "\n")


def test_a_preempted_container_tells_its_command():
    command = "trap 'echo stopped; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        ["bash", str(HOST_LOST), "bash", "-c", command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=60)[0] == "stopped\n"
    assert process.returncode in (5, 143)
