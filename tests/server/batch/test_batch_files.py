"""/v1/files through the application: what is stored, what is refused, and that no name of a client's reaches the disk."""

import json
from pathlib import Path

import pytest

from octavo.server.http.multipart import MAX_FIELD_BYTES, Form
from tests.server.conftest import Serve, error_of

BATCH = {"purpose": "batch"}


def on_disk(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_a_file_comes_back_as_it_went_in(serve: Serve, tmp_path):
    client = serve(files_folder=str(tmp_path))
    content = bytes(range(256)) * 3000 + b"\r\n--not the boundary\r\n"
    sent = await client.post("/v1/files", data=BATCH, files={"file": ("../../etc/pa\nsswd", content)})
    file = sent.json()
    assert sent.status_code == 200, sent.text
    assert file["bytes"] == len(content) and file["object"] == "file" and file["purpose"] == "batch"
    assert file["filename"] == "../../etc/pa%0Asswd" and file["status"] == "processed"  # a label; httpx writes %0A
    assert on_disk(tmp_path) == [f"files/{file['id']}", f"files/{file['id']}.json"]
    assert (await client.get(f"/v1/files/{file['id']}")).json() == file
    got = await client.get(f"/v1/files/{file['id']}/content")
    assert got.content == content and got.headers["content-length"] == str(len(content))
    assert (await client.delete(f"/v1/files/{file['id']}")).json() == {
        "id": file["id"], "deleted": True, "object": "file",
    }  # fmt: skip
    assert on_disk(tmp_path) == []
    assert "no such file" in error_of(await client.get(f"/v1/files/{file['id']}"), 404)["message"]


async def test_lists_are_newest_first_in_pages(serve: Serve, tmp_path):
    client = serve(files_folder=str(tmp_path))
    ids = [(await client.post("/v1/files", data=BATCH, files={"file": (str(n), b"x")})).json()["id"] for n in range(5)]
    page = (await client.get("/v1/files", params={"limit": 2})).json()
    assert [file["id"] for file in page["data"]] == [ids[4], ids[3]] and page["has_more"] is True
    assert (page["first_id"], page["last_id"]) == (ids[4], ids[3])
    rest = (await client.get("/v1/files", params={"after": ids[3]})).json()
    assert [file["id"] for file in rest["data"]] == [ids[2], ids[1], ids[0]] and rest["has_more"] is False
    upward = (await client.get("/v1/files", params={"order": "asc", "after": ids[0], "limit": 1})).json()
    assert [file["id"] for file in upward["data"]] == [ids[1]]
    assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
    for query, field in ((("limit", "0"), "limit"), (("limit", "x"), "limit"), (("order", "up"), "order"),
                         (("after", "../x"), "after")):  # fmt: skip
        assert error_of(await client.get("/v1/files", params=[query]), 400)["param"] == field


@pytest.mark.parametrize("name", ["../secret", "..%2Fsecret", "file-" + "0" * 32, "file-x", "%00", "file-%2e%2e"])
async def test_no_id_leads_out_of_the_folder(serve: Serve, tmp_path, name):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "secret.json").write_text("{}")
    client = serve(files_folder=str(tmp_path / "store"))
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        error_of(await client.request(method, f"/v1/files/{name}{path}"), 404)
    assert (tmp_path / "secret").exists()


async def test_bad_uploads_leave_nothing(serve: Serve, tmp_path):
    client = serve(files_folder=str(tmp_path), max_file_bytes=1000, max_files=1, max_body_bytes=500)

    async def refused(status: int = 400, **request) -> str:
        error = error_of(await client.post("/v1/files", **request), status)
        assert on_disk(tmp_path) == []
        return error["message"]

    file = {"file": ("f", b"x")}
    assert "multipart/form-data" in await refused(json={"purpose": "batch"})
    assert "purpose is missing" in await refused(files=file)
    assert "purpose must be batch" in await refused(data={"purpose": "vision"}, files=file)
    assert "file is missing" in await refused(data=BATCH, files={"other": b"x"})
    assert "limit of 1000 bytes" in await refused(413, data=BATCH, files={"file": ("f", b"x" * 1001)})
    assert "request body is over" in await refused(413, data=BATCH, files={"file": ("f", b"x" * 2**21)})
    anchor = {"expires_after[anchor]": "created_at"}
    assert "between 3600" in await refused(data={**BATCH, **anchor, "expires_after[seconds]": "5"}, files=file)
    assert "anchor" in await refused(data={**BATCH, "expires_after[seconds]": "5000"}, files=file)
    head = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    assert "last boundary" in await refused(content=part + b"half", headers=head)
    assert "well-formed" in await refused(content=b"--x\r\n", headers=head)
    assert "with a filename" in await refused(content=part.replace(b'; filename="f"', b"") + b"--b--", headers=head)
    assert "twice" in await refused(content=(part + b"1\r\n") * 2 + b"--b--", headers=head)
    long = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"p" * (MAX_FIELD_BYTES + 1)
    assert "longer than" in await refused(content=long + b"\r\n--b--", headers=head)


async def test_the_store_is_bounded_in_count_and_bytes(serve: Serve, tmp_path):
    client = serve(files_folder=str(tmp_path), max_files=2, max_files_bytes=2000)

    async def upload(size: int):
        return await client.post("/v1/files", data=BATCH, files={"file": ("f", b"x" * size)})

    assert (await upload(10)).status_code == 200
    assert "--max-files-bytes" in error_of(await upload(5000), 400)["message"]
    assert (await upload(10)).status_code == 200
    assert "--max-files)" in error_of(await upload(10), 400)["message"]
    assert len(on_disk(tmp_path)) == 4


async def test_a_file_is_gone_when_it_has_expired(serve: Serve, tmp_path):
    client = serve(files_folder=str(tmp_path))
    data = {**BATCH, "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600", "colour": "red"}
    file = (await client.post("/v1/files", data=data, files={"file": ("f", b"x")})).json()
    assert file["expires_at"] == file["created_at"] + 3600 and file["ignored_fields"] == ["colour"]
    card = tmp_path / "files" / f"{file['id']}.json"
    card.write_text(card.read_text().replace(str(file["expires_at"]), "1"))
    assert (await client.get("/v1/files")).json()["data"] == []
    error_of(await client.get(f"/v1/files/{file['id']}/content"), 404)
    assert on_disk(tmp_path) == []


async def test_without_a_folder_files_are_refused_in_words(serve: Serve):
    assert "no folder" in error_of(await serve().get("/v1/files"), 400)["message"]


class Kept:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_form_is_the_same_in_whatever_pieces_it_comes(size):
    content = b"\r\n--b\r-\r\n--bb--\r\n--b-."  # nearly the boundary, again and again; with a space behind it, it would be one
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Type: text/x\r\ncontent-disposition: form-data; filename="a;b.jsonl"; name=file\r\n\r\n'
        + content + b"\r\n--b--\r\n"
    )  # fmt: skip
    kept = Kept()
    form = Form(b"b", "file", kept)
    content_end = body
    for at in range(0, len(content_end), size):
        form.feed(body[at : at + size])
    form.finish()
    assert (form.fields, form.filename, kept.data) == ({"purpose": "batch"}, "a;b.jsonl", content)
    assert json.dumps(form.fields)
