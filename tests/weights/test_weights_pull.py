"""Pulling models by name from a small hub over HTTP: which files, resumed downloads, checksums, limits, failures."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.weights.sources import download, source
from octavo.weights.sources.hub_api import Hub, HubTrouble
from octavo.weights.sources.names import ModelName, looks_like_path, read_name, require_name
from octavo.weights.sources.progress import ProgressLine, size_text
from octavo.weights.sources.pull import PullReport, pull
from octavo.weights.sources.store import Store, StoredModel
from tests.registry import Registry, registry

GGUF = {quant: b"GGUF" + quant.encode() * 3000 for quant in ("Q4_K_M", "Q8_0", "BF16")}
SPLIT = {f"Q5_K_M/tiny-Q5_K_M-{number:05}-of-00003.gguf": bytes([number]) * 5000 for number in (1, 2, 3)}


@pytest.fixture
def hub() -> Iterator[Registry]:
    with registry() as opened:
        opened.repositories["org/tiny-GGUF"] = {
            **{f"tiny-{quant}.gguf": data for quant, data in GGUF.items()},
            **SPLIT,
            "mmproj-tiny-F16.gguf": b"vision" * 100,
            "imatrix.gguf": b"matrix" * 100,
            "README.md": b"# tiny",
        }
        opened.repositories["org/tiny"] = {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}" * 100,
            "model.safetensors": b"weights" * 1000,
            "consolidated.safetensors": b"again" * 1000,
            "original/model.safetensors": b"and again" * 1000,
            "pytorch_model.bin": b"pickle",
        }
        yield opened


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return Store()


def run(hub: Registry, store: Store, name: str, reports: list[PullReport] | None = None, **more: object) -> StoredModel:
    environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": str(more.pop("token", "")), "HF_HOME": str(store.root)}
    on_report = (lambda report: None) if reports is None else reports.append
    options = {"retry_seconds": 0.0, "store": store, **more}
    return pull(require_name(name), on_report, hub=Hub(environ, timeout=5), **options)  # type: ignore[arg-type]


def refusal(hub: Registry, store: Store, name: str, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run(hub, store, name, **more)
    assert "\n" not in caught.value.message
    return caught.value.message


# --- names ---


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/tiny", ModelName("org/tiny")),
        ("org/tiny-GGUF:Q4_K_M", ModelName("org/tiny-GGUF", "Q4_K_M")),
        ("hf.co/org/tiny-GGUF:Q8_0", ModelName("org/tiny-GGUF", "Q8_0")),
        ("https://huggingface.co/org/tiny", ModelName("org/tiny")),
        ("org/tiny:latest", ModelName("org/tiny")),
        ("gpt2", ModelName("gpt2")),
        ("hf.co/org/model.gguf", ModelName("org/model.gguf")),
    ],
)
def test_names(text: str, name: ModelName) -> None:
    assert read_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/b/c",
        "/model",
        "./m",
        "org/../x",
        "org/m:",
        "org/m:a/b",
        "org/m:..",
        "org/m: ",
        "m.gguf",
        "x/m.gguf",
        "a b",
    ],
)
def test_what_is_no_name(text: str) -> None:
    assert read_name(text) is None


def test_a_missing_path_is_no_such_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # would fail: it must not be asked
    for name in ("model.gguf", "./model", "models/tiny.gguf", "/tmp/no/such", "~/nothing", "a/b/c.safetensors"):
        assert looks_like_path(name)
        with pytest.raises(ConfigError, match=r"^no such file or folder: "):
            source.resolve(name)


# --- choosing ---


@pytest.mark.parametrize(
    ("name", "tag", "files"),
    [
        ("org/tiny-GGUF:Q8_0", "Q8_0", ["tiny-Q8_0.gguf"]),
        ("org/tiny-GGUF:q8_0", "Q8_0", ["tiny-Q8_0.gguf"]),
        ("org/tiny-GGUF:tiny-Q8_0.gguf", "Q8_0", ["tiny-Q8_0.gguf"]),
        ("hf.co/org/tiny-GGUF", "Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("org/tiny-GGUF:latest", "Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("org/tiny-GGUF:Q5_K_M", "Q5_K_M", [name.partition("/")[2] for name in SPLIT]),
        ("org/tiny", "", ["config.json", "tokenizer.json", "model.safetensors"]),
    ],
)
def test_the_files_of_a_name(hub: Registry, store: Store, name: str, tag: str, files: list[str]) -> None:
    model = run(hub, store, name)
    assert [file.name for file in model.manifest.files] == files
    assert model.name == (f"org/tiny-GGUF:{tag}" if tag else "org/tiny")
    assert model.path == (model.folder / files[0] if tag else model.folder)
    for file in model.manifest.files:
        assert hashlib.sha256((model.folder / file.name).read_bytes()).hexdigest() == file.sha256
    assert store.find(require_name(name)) == model and store.models() == [model]


def test_tags_that_a_repository_has_not(hub: Registry, store: Store) -> None:
    message = refusal(hub, store, "org/tiny-GGUF:Q2_K")
    assert "no file Q2_K" in message and "BF16, Q4_K_M, Q5_K_M, Q8_0" in message
    assert "no .gguf files" in refusal(hub, store, "org/tiny:Q4_K_M")
    hub.repositories["org/pickled"] = {"pytorch_model.bin": b"x"}
    assert "pickled" in refusal(hub, store, "org/pickled")
    del hub.repositories["org/tiny-GGUF"][next(iter(SPLIT))]
    hub.repositories["org/tiny-GGUF"]["Q5_K_M/tiny-Q5_K_M-00001-of-00003.gguf"] = b"1" * 100
    del hub.repositories["org/tiny-GGUF"]["Q5_K_M/tiny-Q5_K_M-00002-of-00003.gguf"]
    assert "lacks Q5_K_M/tiny-Q5_K_M-00002-of-00003.gguf" in refusal(hub, store, "org/tiny-GGUF:Q5_K_M")


@pytest.mark.parametrize("name", ["../../evil.gguf", "a/..", "x/.hidden.gguf", "lock", "manifest.json", "a\nb.gguf"])
def test_file_names_that_could_do_harm(hub: Registry, store: Store, name: str) -> None:
    hub.repositories["org/evil"] = {name: b"x" * 100, "model.safetensors": b"x" * 100, "config.json": b"{}"}
    hub.repositories["org/evil-GGUF"] = {name: b"x" * 100}
    before = set(store.root.parent.parent.rglob("*"))
    for evil in ("org/evil", "org/evil-GGUF"):
        try:
            model = run(hub, store, evil)
        except ConfigError:
            continue
        assert {file.name for file in model.manifest.files} <= {"model.safetensors", "config.json", "evil.gguf"}
    outside = set(store.root.parent.parent.rglob("*")) - before
    assert all(store.root in (path, *path.parents) or path in store.root.parents for path in outside), outside


# --- downloading ---


def test_a_download_continues_where_it_broke_off(hub: Registry, store: Store) -> None:
    reports: list[PullReport] = []
    hub.cuts = [4000, 3000]
    data = GGUF["Q4_K_M"]
    model = run(hub, store, "org/tiny-GGUF:Q4_K_M", reports)
    assert model.path.read_bytes() == data
    assert [asked for _, asked, _ in hub.requests] == ["", "bytes=4000-", "bytes=7000-"]
    assert reports[0].status == "pulling manifest"
    assert [report.status for report in reports][-2:] == ["writing manifest", "success"]
    last = [report for report in reports if report.total][-1]
    assert (last.completed, last.total) == (len(data), len(data))
    assert last.digest == hashlib.sha256(data).hexdigest()


def test_the_next_pull_continues_an_interrupted_one(hub: Registry, store: Store) -> None:
    hub.cuts = [4000, *[0] * download.MAX_TRIES]
    with pytest.raises(HubTrouble, match=r"ended tiny-Q4_K_M\.gguf after 4000 of"):
        run(hub, store, "org/tiny-GGUF:Q4_K_M")
    assert store.models() == [] and store.find(require_name("org/tiny-GGUF:Q4_K_M")) is None
    hub.requests.clear()
    hub.cuts.clear()
    assert run(hub, store, "org/tiny-GGUF:Q4_K_M").path.read_bytes() == GGUF["Q4_K_M"]
    assert [asked for _, asked, _ in hub.requests] == ["bytes=4000-"]
    hub.requests.clear()
    run(hub, store, "org/tiny-GGUF:Q4_K_M")
    assert hub.requests == [], "what is here is not fetched again"


def test_parts_that_are_complete_stay_when_a_later_one_fails(hub: Registry, store: Store) -> None:
    hub.cuts = [5000, *[0] * download.MAX_TRIES]
    with pytest.raises(HubTrouble):
        run(hub, store, "org/tiny-GGUF:Q5_K_M")
    hub.requests.clear()
    hub.cuts.clear()
    run(hub, store, "org/tiny-GGUF:Q5_K_M")
    assert len(hub.requests) == 2, "the first part was complete"


def test_a_hub_without_ranges_sends_all_of_it_again(hub: Registry, store: Store) -> None:
    hub.has_ranges, hub.cuts = False, [4000]
    assert run(hub, store, "org/tiny-GGUF:Q8_0").path.read_bytes() == GGUF["Q8_0"]


def test_wrong_bytes_are_noticed_and_removed(hub: Registry, store: Store) -> None:
    hub.spoilt.add("tiny-Q8_0.gguf")
    assert "SHA-256" in refusal(hub, store, "org/tiny-GGUF:Q8_0")
    assert not [path for path in store.root.rglob("*") if path.is_file() and path.name != "lock"]
    hub.spoilt.clear()
    assert run(hub, store, "org/tiny-GGUF:Q8_0").path.read_bytes() == GGUF["Q8_0"]


def test_a_start_that_was_damaged_here_is_noticed(hub: Registry, store: Store) -> None:
    hub.cuts = [4000, *[0] * download.MAX_TRIES]
    with pytest.raises(HubTrouble):
        run(hub, store, "org/tiny-GGUF:Q8_0")
    (part,) = store.root.rglob("*.part")
    part.write_bytes(b"x" * 4000)
    assert "SHA-256" in refusal(hub, store, "org/tiny-GGUF:Q8_0")
    assert run(hub, store, "org/tiny-GGUF:Q8_0").path.read_bytes() == GGUF["Q8_0"]


def test_a_new_version_replaces_the_old_one(hub: Registry, store: Store) -> None:
    run(hub, store, "org/tiny-GGUF:Q8_0")
    hub.cuts = [4000, *[0] * download.MAX_TRIES]
    hub.repositories["org/tiny-GGUF"]["tiny-Q8_0.gguf"] = b"older" * 2000
    with pytest.raises(HubTrouble):
        run(hub, store, "org/tiny-GGUF:Q8_0")
    hub.repositories["org/tiny-GGUF"]["tiny-Q8_0.gguf"] = b"newer" * 2000
    model = run(hub, store, "org/tiny-GGUF:Q8_0")
    assert model.path.read_bytes() == b"newer" * 2000
    assert {path.name for path in model.folder.iterdir()} == {"tiny-Q8_0.gguf", "manifest.json", "lock"}


def test_a_few_errors_are_tried_again_and_many_end_it(hub: Registry, store: Store) -> None:
    repository = Hub({"HF_ENDPOINT": hub.url, "HF_HOME": "/nowhere"}).list_files("org/tiny-GGUF")
    hub.num_errors = download.MAX_TRIES - 1
    file = next(file for file in repository.files if file.name == "tiny-Q8_0.gguf")
    target = store.root / "x.gguf"
    target.parent.mkdir(parents=True)
    opened = Hub({"HF_ENDPOINT": hub.url, "HF_HOME": "/nowhere"})
    download.Download(opened, repository, file, target, lambda _: None, 0.0).run()
    assert target.read_bytes() == GGUF["Q8_0"]
    hub.num_errors = 100
    with pytest.raises(HubTrouble, match="answered 500"):
        run(hub, store, "org/tiny-GGUF:Q8_0")


def test_a_token_goes_to_the_hub_and_to_no_other_host(hub: Registry, store: Store) -> None:
    hub.token = "secret"
    assert "HF_TOKEN" in refusal(hub, store, "org/tiny-GGUF:Q8_0")
    assert "does not accept the token" in refusal(hub, store, "org/tiny-GGUF:Q8_0", token="wrong")
    run(hub, store, "org/tiny-GGUF:Q8_0", token="secret")
    assert hub.requests[-1][2] and hub.stored_requests == [False]


def test_refusals_of_the_hub(hub: Registry, store: Store) -> None:
    assert "there is no model org/nothing" in refusal(hub, store, "org/nothing")
    hub.gated.add("org/gated")
    assert "gated" in refusal(hub, store, "org/gated")
    assert "--revision" in refusal(hub, store, "org/tiny", revision="v9")
    for listing in (b"<html>", b"[]", b"{}", json.dumps({"sha": "../..", "siblings": []}).encode(), b"[" * 10**5):
        hub.listing = listing
        assert "did not answer as a hub does" in refusal(hub, store, "org/tiny")
    for entry in ({"rfilename": 3, "size": 1}, {"rfilename": "a", "size": -1}, {"rfilename": "a"}, 7):
        hub.listing = json.dumps({"sha": "a" * 40, "siblings": [entry]}).encode()
        assert "did not answer as a hub does" in refusal(hub, store, "org/tiny")


def test_without_a_network_it_says_so(store: Store) -> None:
    with pytest.raises(HubTrouble, match=r"cannot be reached \(.*check the network connection"):
        pull(ModelName("org/tiny"), lambda _: None, hub=Hub({"HF_ENDPOINT": "http://127.0.0.1:1"}), store=store)
    for name, says in (("llama3.2", True), ("org/tiny", False)):  # whether it is a name of Ollama's library
        with pytest.raises(HubTrouble) as trouble:
            pull(ModelName(name, "1b"), lambda _: None, hub=Hub({"HF_ENDPOINT": "http://127.0.0.1:1"}), store=store)
        assert ("models are named owner/name, not as in Ollama's library" in str(trouble.value)) is says
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        pull(ModelName("org/tiny"), lambda _: None, hub=Hub({"HF_HUB_OFFLINE": "1"}), store=store)
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        Hub({"HF_ENDPOINT": "huggingface.co"})


# --- limits ---


def test_a_store_that_is_full_takes_no_more(hub: Registry, store: Store) -> None:
    size = len(GGUF["Q8_0"])
    model = run(hub, store, "org/tiny-GGUF:Q8_0", max_store_bytes=size)
    message = refusal(hub, store, "org/tiny-GGUF:Q4_K_M", max_store_bytes=size + 100)
    assert "--max-model-store-bytes" in message and str(size + 100) in message
    assert len(hub.requests) == 1, "not a byte of it was fetched"
    store.remove(model)
    assert store.models() == [] and list(store.root.iterdir()) != [], "the folder of the refused one stays locked"
    run(hub, store, "org/tiny-GGUF:Q4_K_M", max_store_bytes=len(GGUF["Q4_K_M"]))


def test_a_disk_that_is_full_takes_no_more(hub: Registry, store: Store) -> None:
    huge = {"rfilename": "huge-Q4_0.gguf", "size": 2**60, "lfs": {"size": 2**60, "sha256": "0" * 64}}
    hub.listing = json.dumps({"sha": "a" * 40, "siblings": [huge]}).encode()
    assert "are free on the disk" in refusal(hub, store, "org/tiny")


def test_more_bytes_than_were_listed_end_the_download(hub: Registry, store: Store) -> None:
    data = GGUF["Q8_0"]
    entry = {"rfilename": "tiny-Q8_0.gguf", "size": 100, "lfs": {"size": 100, "sha256": "0" * 64}}
    hub.listing = json.dumps({"sha": "a" * 40, "siblings": [entry]}).encode()
    message = refusal(hub, store, "org/tiny-GGUF")
    assert f"has {len(data)} bytes" in message and "100 bytes" in message


def test_two_pulls_of_one_model_do_not_meet(hub: Registry, store: Store) -> None:
    with store.changing(store.folder_of(ModelName("org/tiny-GGUF", "Q8_0"))):
        assert "being pulled by another process" in refusal(hub, store, "org/tiny-GGUF:Q8_0")


def test_a_report_that_raises_stops_the_pull(hub: Registry, store: Store) -> None:
    class Stopped(Exception):
        pass

    def stop(report: PullReport) -> None:
        if report.completed:
            raise Stopped

    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": "/nowhere"}
    with pytest.raises(Stopped):
        pull(ModelName("org/tiny-GGUF", "Q8_0"), stop, hub=Hub(environ), store=store)
    run(hub, store, "org/tiny-GGUF:Q8_0")


# --- the store ---


def test_what_is_pulled_is_served_by_name(hub: Registry, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    found = source.resolve("hf.co/org/tiny-GGUF:Q4_K_M")
    assert (found.name, found.kind) == ("org/tiny-GGUF:Q4_K_M", "gguf") and found.path.read_bytes() == GGUF["Q4_K_M"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert source.resolve("org/tiny-GGUF:q4_k_m") == found == source.resolve("org/tiny-GGUF")
    with pytest.raises(ConfigError, match="cannot be reached"):
        source.resolve("org/tiny-GGUF:Q8_0")


def test_damaged_entries_are_no_models(hub: Registry, store: Store) -> None:
    model = run(hub, store, "org/tiny-GGUF:Q8_0")
    manifest = model.folder / "manifest.json"
    whole = manifest.read_bytes()
    for text in (b"", b"[]", whole.replace(b"tiny-Q8_0.gguf", b"../../../x"), whole.replace(b"tiny-Q8_0", b"gone")):
        manifest.write_bytes(text)
        assert store.models() == [] and store.find(ModelName("org/tiny-GGUF", "Q8_0")) is None
    manifest.write_bytes(whole)
    assert store.models() == [model]
    assert model.num_bytes == len(GGUF["Q8_0"]) and len(model.digest) == 64


# --- progress ---


class Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self.text, self._is_terminal = "", is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_is_one_line_on_a_terminal_and_few_lines_elsewhere() -> None:
    for is_terminal in (True, False):
        out = Terminal(is_terminal)
        line = ProgressLine(out)  # type: ignore[arg-type]
        line(PullReport("pulling manifest"))
        for completed in range(101):
            line(PullReport("pulling x.gguf", "d", completed * 10**7, 10**9))
        line(PullReport("success"))
        line.close()
        assert out.text.startswith("octavo: pulling manifest\n") and out.text.endswith("octavo: success\n")
        assert "100% of 1.0 GB" in out.text
        assert out.text.count("\n") == (3 if is_terminal else 4)
        assert out.text.count("\r") == (101 if is_terminal else 0)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (4.7e9, "4.7 GB")])
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_manifest_with_a_name_that_is_too_long_is_no_model(tmp_path: Path) -> None:
    """A damaged file of the store must not keep the other models from being listed."""
    folder = tmp_path / "org" / "model" / "tag"
    folder.mkdir(parents=True)
    for name in ("a" * 300, "a\0b"):
        files = [{"name": name, "num_bytes": 1, "sha256": ""}]
        manifest = {"name": "m:tag", "kind": "gguf", "commit": "c", "files": files, "pulled": 1.0}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert Store(tmp_path).models() == []
