"""The demo's training: the text, the tokenizer, the forward pass, a run that stops and goes on."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from kernjax.base.errors import UserError
from kernjax.demo import data, loop, net
from kernjax.demo.architecture import hf_config
from kernjax.demo.delta_rule import gated_delta_rule
from kernjax.demo.export import export
from kernjax.demo.loop import Settings, share_done, train
from kernjax.demo.measure import binned, position_statistics
from kernjax.demo.optimiser import orthogonalise, rate
from kernjax.demo.tokenizer import END_OF_TEXT, train_tokenizer
from kernjax.model import ModelConfig
from kernjax.weights import load_model, load_params

CONFIG = hf_config(280, groups=1, hidden=32, mlp=48, head_dim=16)
SETTINGS = Settings(
    steps=10,
    batch_tokens=256,
    lengths=(64,),
    lengths_from=(0.0,),
    eval_steps=10,
    eval_length=64,
    eval_windows=2,
    checkpoint_s=0.0,
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory):
    """Three runs compile the same programs: the second and third read them from a cache."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("xla")), 0.0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two books, one of them with a licence around it, and a few modules."""
    root = tmp_path_factory.mktemp("texts")
    books, modules = root / "books", root / "modules"
    (modules / "test").mkdir(parents=True)
    books.mkdir()
    sentence = "It was a bright cold day in April, and the clocks were striking thirteen.\n\n"
    (books / "b.txt").write_text(sentence * 200)
    (books / "a.txt").write_text(
        "Licence\n*** START OF THIS PROJECT GUTENBERG EBOOK A ***\n"
        + "Once upon a time there were four little rabbits.\n\n" * 200
        + "*** END OF THIS PROJECT GUTENBERG EBOOK A ***\nMore licence"
    )
    for number in range(40):
        body = f"def f{number}(x):\n    return x + {number}\n\n\n"
        (modules / f"m{number}.py").write_text(body * 20)
    (modules / "test" / "t.py").write_text("assert True\n")
    return books, modules


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def texts(folders, workdir):
    books, modules = folders
    return data.prepare(books, workdir / "tokens", seed=0, vocab_size=280, modules=modules)


@pytest.fixture(scope="module")
def finished(texts, workdir):
    """A run that nothing interrupted, and its summary."""
    return workdir, train(CONFIG, texts, workdir, SETTINGS)


def test_texts_are_cut_and_split_by_name(folders):
    books = data.read_books(folders[0])
    assert not any("icence" in book.text for book in books)
    assert [(book.name, book.held_out) for book in books] == [
        ("a (end)", True),
        ("a", False),
        ("b", False),
    ]
    modules = data.read_modules(folders[1])
    assert len(modules) == 40 and not any("test/" in module.name for module in modules)
    assert 0 < sum(module.held_out for module in modules) < 20
    assert data.read_modules(folders[1]) == modules


def test_token_streams_hold_the_documents(texts, folders):
    decoded = texts.tokenizer.decode(texts.train["prose"].tolist(), skip_special_tokens=False)
    assert decoded.count(END_OF_TEXT) == 2 and decoded.endswith(END_OF_TEXT)
    body = data.book_body((folders[0] / "b.txt").read_text())
    assert decoded.split(END_OF_TEXT)[1] == body
    counted = {(row["split"], row["kind"]): row["tokens"] for row in texts.card["sources"]}
    assert counted["held_out", "code"] == len(texts.held_out["code"])


def test_tokens_are_cached_until_the_texts_change(folders, tmp_path):
    books, modules = folders
    first = data.prepare(books, tmp_path, seed=0, vocab_size=280, modules=modules)
    path = tmp_path / "train.code.npy"
    path.touch()
    stamp = path.stat().st_mtime_ns
    data.prepare(books, tmp_path, seed=0, vocab_size=280, modules=modules)
    assert path.stat().st_mtime_ns == stamp
    other = data.prepare(books, tmp_path, seed=0, vocab_size=300, modules=modules)
    assert path.stat().st_mtime_ns > stamp
    assert other.card["texts_sha256"] != first.card["texts_sha256"]


def test_missing_books_are_a_user_error(tmp_path):
    with pytest.raises(UserError, match="books"):
        data.read_books(tmp_path)


def test_tokenizer_is_deterministic_and_lossless():
    documents = [["A day like any other day.\n"] * 50, ["def day(self):\n    return None\n"] * 50]
    first, second = (train_tokenizer(documents, seed=3, vocab_size=290) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.token_to_id(END_OF_TEXT) == 0 and first.get_vocab_size() <= 290
    text = "día \t\n\n  naïve 日本 \x00"
    assert first.decode(first.encode(text).ids) == text


def test_windows_cover_the_stream_evenly():
    stream = np.arange(10_000, dtype=np.uint16)
    windows = data.sample_windows(stream, 0, 99, 100)
    covered = np.zeros(10_000, bool)
    covered[windows] = True
    assert covered.mean() > 0.75
    np.testing.assert_array_equal(data.sample_windows(stream, 40, 5, 100), windows[40:45])
    with pytest.raises(UserError, match="tokens"):
        data.sample_windows(stream[:50], 0, 1, 100)


def test_forward_pass_is_the_models(monkeypatch, tmp_path, texts):
    # In float32 throughout, so that only the order of sums differs.
    monkeypatch.setattr(net, "_low", lambda x: x)
    monkeypatch.setattr(net, "MIN_QUERY_BLOCK", 16)
    from kernjax.weights import save_hf

    config = ModelConfig.from_dict(CONFIG)
    params = net.init_params(config, 1)
    save_hf(params, CONFIG, tmp_path)
    tokens = data.sample_windows(texts.train["code"], 0, 2, 150)
    expected = position_statistics(load_model(tmp_path), tokens, 64)["loss"]
    found = net.token_losses(params, jnp.asarray(tokens), config)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("shapes", [((3, 5, 16), (16, 8)), ((2, 3, 5, 16), (2, 3, 16, 8))])
def test_bf16_products_and_their_gradients(shapes):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in shapes)
    (y, back), (expected, expected_back) = (jax.vjp(f, a, b) for f in (net._dot, jnp.matmul))
    grad = jnp.asarray(rng.integers(-4, 5, y.shape), jnp.float32)
    # Small integers: every product and sum is exact in either arithmetic.
    np.testing.assert_array_equal(y, expected)
    for found, wanted in zip(back(grad), expected_back(grad), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_delta_rule_and_its_gradient_follow_the_recurrence():
    rng = np.random.default_rng(0)
    time, dim = 70, 8
    q, k = (rng.standard_normal((1, time, 1, dim)).astype(np.float32) for _ in "qk")
    q, k = (jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True)) for x in (q, k))
    v = jnp.asarray(rng.standard_normal((1, time, 2, dim)).astype(np.float32))
    g = jnp.asarray(-rng.uniform(0, 0.5, (1, time, 2)).astype(np.float32))
    beta = jnp.asarray(rng.uniform(0, 1, (1, time, 2)).astype(np.float32))

    def recurrence(q, k, v, g, beta):
        def step(state, xs):
            q, k, v, g, beta = xs  # [1, dim], [1, dim], [2, dim], [2], [2]
            state = state * jnp.exp(g)[:, None, None]
            change = beta[:, None] * (v - jnp.einsum("k,hkv->hv", k[0], state))
            state = state + k[0][None, :, None] * change[:, None]
            return state, jnp.einsum("k,hkv->hv", q[0] * dim**-0.5, state)

        xs = tuple(x[0] for x in (q, k, v, g, beta))
        return jax.lax.scan(step, jnp.zeros((2, dim, dim)), xs)[1][None]

    arguments = (q, k, v, g, beta)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(gated_delta_rule(*arguments), recurrence(*arguments), atol=1e-5)
        weight = jnp.asarray(rng.standard_normal((1, time, 2, dim)).astype(np.float32))
        found, expected = (
            jax.grad(lambda a, f=f: jnp.sum(weight * f(*a)))(arguments)
            for f in (gated_delta_rule, recurrence)
        )
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4)


def test_convolution_and_its_gradient():
    rng = np.random.default_rng(0)
    x, grad = (jnp.asarray(rng.standard_normal((2, 20, 3)), jnp.float32) for _ in "xg")
    weight = jnp.asarray(rng.standard_normal((4, 3)), jnp.float32)

    def plain(x, weight):
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        return sum(padded[:, tap : tap + 20] * weight[tap] for tap in range(4))

    (y, back), (expected, expected_back) = (
        jax.vjp(f, x, weight) for f in (net._causal_conv, plain)
    )
    np.testing.assert_allclose(y, expected, atol=1e-6)
    for a, b in zip(back(grad), expected_back(grad), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_orthogonalise_brings_singular_values_to_one():
    x = np.random.default_rng(0).standard_normal((3, 16, 40)).astype(np.float32)
    values = np.linalg.svd(np.asarray(orthogonalise(jnp.asarray(x))), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.3


def test_rate_warms_up_stays_and_falls_to_zero():
    assert rate(0, 0.0, 0.3) < 0.05
    assert rate(1000, 0.5, 0.3) == 1.0
    assert rate(1000, 0.85, 0.3) == pytest.approx(0.5)
    assert rate(1000, 1.0, 0.3) == 0.0


def test_loss_falls(finished):
    workdir, summary = finished
    rows = [json.loads(line) for line in (workdir / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rate" in row]
    assert [row["step"] for row in steps] == list(range(1, 11))
    assert steps[-1]["tokens"] == summary["tokens"] == 10 * 256
    for kind in data.KINDS:
        assert steps[-1][kind] < steps[0][kind] - 0.05
        assert summary["held_out"][kind] < np.log(280)


def test_an_interrupted_run_goes_on_bit_by_bit(finished, texts, tmp_path, monkeypatch):
    write = loop._Journal.write

    def interrupt(self, row, left):
        if row["step"] == 7:
            raise KeyboardInterrupt
        write(self, row, left)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Journal, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(CONFIG, texts, tmp_path, SETTINGS)
    summary = train(CONFIG, texts, tmp_path, SETTINGS)
    assert summary["held_out"] == finished[1]["held_out"]
    with np.load(tmp_path / "checkpoint.npz") as a, np.load(finished[0] / "checkpoint.npz") as b:
        assert sorted(a.files) == sorted(b.files) and len(a.files) > 20
        for name in a.files:
            if name != "progress":  # holds wall times
                assert a[name].tobytes() == b[name].tobytes(), name


def test_a_checkpoint_of_another_model_is_refused(finished, texts):
    wider = hf_config(280, groups=1, hidden=48, mlp=48, head_dim=16)
    with pytest.raises(UserError, match="other settings"):
        train(wider, texts, finished[0], SETTINGS)
    assert json.loads((finished[0] / "config.json").read_text()) == CONFIG


def test_export_is_an_hf_directory(finished, tmp_path):
    workdir, _ = finished
    measured = {"rows": [{"kind": "code", "from": 0, "to": 9, "loss": 1, "tail": 0.1, "top1": 1}]}
    summary = export(workdir, tmp_path, measured)
    assert summary["step"] == 10
    decoder = load_model(tmp_path)
    with np.load(workdir / "checkpoint.npz") as file:
        trained = file["params['linear']['qkv']"]
    params = load_params(tmp_path, decoder.config)
    np.testing.assert_array_equal(
        np.asarray(params["linear"]["qkv"].astype(jnp.float32)),
        trained.astype(jnp.bfloat16).astype(np.float32),
    )
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() <= 280
    card = (tmp_path / "README.md").read_text()
    assert "10 steps" in card and "| code | 0-9 | 1.000 | 0.1000 | 1.000 |" in card


@pytest.mark.parity
def test_transformers_reads_the_export(finished, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    workdir, _ = finished
    export(workdir, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("Once upon a time")["input_ids"]
    assert (
        ids == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Once upon a time").ids
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    tokens = np.asarray([ids], np.int32)
    expected = position_statistics(load_model(tmp_path), tokens, 16)["loss"][0]
    targets = -logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    np.testing.assert_allclose(targets, expected, atol=1e-3)


def test_measured_bins_end_where_the_text_does():
    values = {name: np.ones((2, 700), np.float32) for name in ("loss", "tail", "top1")}
    assert [(row["from"], row["to"]) for row in binned(values)] == [(0, 64), (64, 512), (512, 700)]


def test_the_stop_file_moves_the_end(tmp_path):
    settings = Settings(stop_at="2026-01-01T01:00")
    state = loop.Progress(started=loop.utc("2026-01-01T00:00"))
    assert share_done(settings, state, tmp_path) == 1.0  # long past
    (tmp_path / loop.STOP_FILE).write_text("2999-01-01T00:00\n")
    assert share_done(settings, state, tmp_path) < 0.5
    assert share_done(Settings(steps=4), loop.Progress(step=1), tmp_path) == 0.25


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"steps": 1, "stop_at": "2026-01-01T01:00"},
        {"stop_at": "tomorrow"},
        {"steps": 1, "lengths": (8, 16)},
        {"steps": 1, "lengths": (8,), "lengths_from": (0.5,)},
    ],
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(UserError):
        Settings(**wrong)


def test_sequences_grow_as_the_run_goes_on():
    settings = Settings(steps=1, lengths=(8, 16, 32), lengths_from=(0.0, 0.5, 0.9))
    shares = (0.0, 0.49, 0.5, 0.89, 0.9, 1.0)
    assert [settings.length_at(share) for share in shares] == [8, 8, 16, 16, 32, 32]


def test_rows_split_over_devices():
    assert Settings(steps=1, batch_tokens=2048, devices=2).windows_of(512) == 2
    assert Settings(steps=1, batch_tokens=2048, devices=2).windows_of(4096) == 1
    with pytest.raises(UserError, match="devices"):
        Settings(steps=1, devices=3).windows_of(4096)
