"""The table of adapters: pages and search by the server, what can be done with one, and ids that nobody should have."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from api.schemas.openapi_examples import EXAMPLES
from tests.browser.conftest import NUM_COPIES

MARKUP = "<img src=x onerror=window.hurt=1>"


def ids(page: Any) -> list[str]:
    return page.locator("#adapters-rows th").all_inner_texts()


def row(page: Any, name: str) -> Any:
    return page.locator("#adapters-rows tr").filter(
        has=page.get_by_role("button", name=f"Details of {name}", exact=True)
    )


def told(page: Any, words: str) -> None:
    """Waits until the table has said so."""
    page.locator("#adapters-note", has_text=words).wait_for()


def test_pages_are_the_servers(page, eventually) -> None:
    eventually(lambda: len(ids(page)) == 25)
    seen = ids(page)
    for number in (2, 3):
        page.click("#adapters-next")
        page.locator("#adapters-page", has_text=f"Page {number}").wait_for()
        seen += ids(page)
    assert len(seen) == NUM_COPIES + 3
    assert seen == sorted(set(seen))
    assert page.locator("#adapters-next").is_disabled()
    page.click("#adapters-previous")
    page.locator("#adapters-page", has_text="Page 2").wait_for()
    assert ids(page) == seen[25:50]


def test_search_is_the_servers(page, eventually) -> None:
    eventually(lambda: len(ids(page)) == 25)
    with page.expect_request(re.compile(r"/v1/adapters\?search=copy-3&limit=25$")):
        page.fill("#adapters-search", "COPY-3")
    eventually(lambda: ids(page) == [f"copy-3{digit}" for digit in range(10)])
    page.fill("#adapters-search", "nobody")
    page.locator("#adapters-about", has_text="None has such an id").wait_for()


def test_warm_pin_and_tier(page, served, eventually) -> None:
    page.fill("#adapters-search", "two")
    eventually(lambda: ids(page) == ["two"])
    row(page, "two").get_by_role("button", name="Warm two").click()
    told(page, "two is in the pool")
    assert served.http.get("/v1/adapters/two").json()["tier"] == "resident"
    row(page, "two").get_by_role("button", name="Pin two").click()
    told(page, "two stays in the pool")
    assert [p["ids"] for p in served.http.get("/v1/pool").json()["promised"] if p["pinned"]] == [["two"]]
    assert "the pool, pinned" in row(page, "two").inner_text()
    row(page, "two").get_by_role("button", name="Unpin two").click()
    told(page, "two may leave the pool")
    assert not [p for p in served.http.get("/v1/pool").json()["promised"] if p["pinned"]]


def test_those_in_the_pool(page, served, eventually) -> None:
    served.post("/v1/adapters/three:warm", deadline_ms=20_000)
    page.locator("#adapters-views label", has_text="In the pool").click()
    resident = sorted({name for a in served.http.get("/v1/pool").json()["adapters"] for name in a["ids"]})
    eventually(lambda: ids(page) == resident[:25])
    assert "three" in resident


def test_details(page, served, eventually) -> None:
    served.http.patch(
        "/v1/adapters/one", json={"aliases": {"prod": 1}, "limits": {"max_running": 3}}
    ).raise_for_status()
    page.fill("#adapters-search", "one")
    eventually(lambda: ids(page) == ["one"])
    row(page, "one").get_by_role("button", name="Details of one").click()
    dialog = page.locator("#details-dialog")
    dialog.get_by_text("Report of the upload").wait_for()
    shown, text = served.http.get("/v1/adapters/one").json(), dialog.inner_text()
    report = shown["report"]
    for wanted in (
        shown["digest"],
        "prod → 1",
        "3 running at a time",
        f"{report['modules_matched']} of {report['modules_expected']} matched",
        report["dtype"],
        "lorasrv verify one",
    ):
        assert wanted in text, wanted
    page.keyboard.press("Escape")
    assert dialog.is_hidden()
    assert page.evaluate("document.activeElement.textContent") == "one", "the focus goes back"


def test_a_verdict_is_shown(open_page, served, eventually) -> None:
    """In words: no name of a JSON field, and what passed is not called refused."""
    record = served.http.get("/v1/adapters/two").json()
    verdict = EXAMPLES["POST", "/v1/adapters/{reference}:verify"].answer | {"notes": ["barely seen"]}

    def shown(**changes: Any) -> tuple[str, str]:
        def prepare(page: Any) -> None:
            answer = record | {"verified": verdict | changes}
            page.route(re.compile("/v1/adapters/two$"), lambda route: route.fulfill(json=answer))

        page = open_page(prepare=prepare)
        page.fill("#adapters-search", "two")
        eventually(lambda: ids(page) == ["two"])
        row(page, "two").get_by_role("button", name="Details of two").click()
        dialog = page.locator("#details-dialog")
        dialog.locator("summary", has_text="Figures").click()
        dialog.get_by_text("Same likeliest token").wait_for()
        return dialog.locator(".note").last.inner_text(), dialog.inner_text()

    note, text = shown()
    assert re.match(r"Within rounding: .*\. Version 1, \d{4}-\d\d-\d\d .*\s+barely seen", note)
    assert "33 of 36 with the adapter" in text
    assert re.findall(r"\w+_\w+|max abs|greedy", text.replace("q_proj", "").replace("self_attn", "")) == []
    note, _ = shown(verdict="differs", reasons=["9 of 210 linears are off"])
    assert re.match(r"Differs: .*\s+9 of 210 linears are off\s+barely seen", note)


def test_a_ledger_is_shown_where_there_is_one(page, eventually) -> None:
    figures = {"requests": 1234, "errors": 2, "disk_loads": 3, "disk_bytes": 2 << 20, "found": {"host": 5}}
    page.route(re.compile("/v1/adapters/two/stats$"), lambda route: route.fulfill(json=figures))
    page.fill("#adapters-search", "two")
    eventually(lambda: ids(page) == ["two"])
    row(page, "two").get_by_role("button", name="Details of two").click()
    dialog = page.locator("#details-dialog")
    dialog.get_by_text("Ledger").wait_for()
    assert re.search(r"Requests\s*1,234, 2 failed", dialog.inner_text())
    assert re.search(r"Adapter was\s*5 on the host", dialog.inner_text())
    assert re.search(r"Loads\s*3 files read, 2.0 MiB", dialog.inner_text())


def test_the_page_before_an_emptied_one_is_shown(page, served, eventually) -> None:
    names = [f"z-{number:02}" for number in range(26)]
    for name in names:
        served.post("/v1/adapters", id=name, defaults={"seed": 1}).raise_for_status()
    try:
        page.fill("#adapters-search", "z-")
        eventually(lambda: ids(page) == names[:25])
        page.click("#adapters-next")
        eventually(lambda: ids(page) == names[25:])
        row(page, names[25]).get_by_role("button", name=f"Delete {names[25]}").click()
        page.locator("#confirm-yes").click()
        eventually(lambda: ids(page) == names[:25])
        assert page.locator("#adapters-page").inner_text() == "Page 1"
    finally:
        for name in names:
            served.http.delete(f"/v1/adapters/{name}", params={"force": True})


def test_deleting_asks_first(page, served, eventually) -> None:
    page.fill("#adapters-search", "copy-59")
    eventually(lambda: ids(page) == ["copy-59"])
    delete = row(page, "copy-59").get_by_role("button", name="Delete copy-59")
    delete.click()
    page.get_by_role("button", name="Keep it").click()
    assert served.http.get("/v1/adapters/copy-59").status_code == 200
    served.http.patch("/v1/adapters/copy-59", json={"aliases": {"prod": 1}}).raise_for_status()
    try:
        delete.click()
        page.locator("#confirm-yes").click()
        told(page, "Refused")
        assert served.http.get("/v1/adapters/copy-59").status_code == 200
        delete.click()
        assert not page.locator("#confirm-force").is_checked()
        page.locator("#confirm-force").check()
        page.locator("#confirm-yes").click()
        told(page, "copy-59 is deleted, 1 version")
        assert served.http.get("/v1/adapters/copy-59").status_code == 404
        eventually(lambda: ids(page) == [])
    finally:
        body = served.http.get("/v1/adapters/copy-58").json()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": "all-linear"}
        served.post("/v1/adapters", id="copy-59", config=config, weights=body["digest"])


def test_a_refused_deletion_says_why(page, eventually) -> None:
    error = {"error": {"message": f"prod names it {MARKUP}", "type": "x", "param": "force", "code": "version_in_use"}}
    page.route(
        re.compile("/v1/adapters/copy-01"),
        lambda route: route.fulfill(status=409, json=error) if route.request.method == "DELETE" else route.continue_(),
    )
    page.fill("#adapters-search", "copy-01")
    eventually(lambda: ids(page) == ["copy-01"])
    row(page, "copy-01").get_by_role("button", name="Delete copy-01").click()
    page.locator("#confirm-yes").click()
    told(page, "Refused")
    assert f"Deleting copy-01: Prod names it {MARKUP}." in page.locator("#adapters-note").inner_text()
    assert ids(page) == ["copy-01"]


def test_hostile_names_stay_text(open_page, served, eventually) -> None:
    """The server takes no such id, alias or warning; should one come all the same, it is text."""
    record = {**served.http.get("/v1/adapters/two").json(), "id": MARKUP, "aliases": {MARKUP: 1}}
    record["report"] = {**record["report"], "warnings": [MARKUP], "dtype": MARKUP}

    def prepare(page: Any) -> None:
        whole = {"object": "list", "data": [record], "has_more": False}
        page.route(re.compile(r"/v1/adapters\?"), lambda route: route.fulfill(json=whole))
        page.route(re.compile(r"/v1/adapters/%3Cimg"), lambda route: route.fulfill(json=record))
        models = {"object": "list", "data": [{"id": MARKUP}, {"id": MARKUP}, {"id": MARKUP}], "has_more": False}
        page.route(re.compile(r"/v1/models\?"), lambda route: route.fulfill(json=models))

    page = open_page(prepare=prepare)
    eventually(lambda: ids(page) == [MARKUP])
    assert page.input_value("#lane-1") == MARKUP
    page.locator("#adapters-rows th button").click()
    page.get_by_text("Report of the upload").wait_for()
    assert page.locator("#details-dialog .note").inner_text().count(MARKUP) == 1
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hurt") is None


class TestUpload:
    @pytest.fixture
    def folder(self, adapter_dirs: dict[str, Path], tmp_path: Path) -> Path:
        folder = tmp_path / "My Bot"
        folder.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_bytes((adapter_dirs["three"] / name).read_bytes())
        return folder

    def send(self, page: Any, name: str, files: list[Path]) -> Any:
        page.set_input_files("#files-input", files)
        page.fill("#upload-id", name)
        page.click("#upload-send")
        result = page.locator("#upload-result")
        result.locator(".note").first.wait_for()
        return result

    def change(self, folder: Path, **fields: object) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def test_its_report_and_warnings(self, page, served, folder: Path, eventually) -> None:
        self.change(folder, base_model_name_or_path=MARKUP, lora_alpha=99)
        page.fill("#upload-alias", "prod")
        result = self.send(page, "fresh", sorted(folder.iterdir()))
        shown = served.http.get("/v1/adapters/fresh").json()
        try:
            assert shown["aliases"] == {"prod": 1}
            text = result.inner_text()
            assert f"fresh is version 1 ({shown['digest'][7:19]}), and fresh:prod names it." in text
            assert shown["report"]["warnings"]
            assert all(warning in text for warning in shown["report"]["warnings"])
            assert MARKUP in text
            assert page.locator("img").count() == 0
            page.fill("#adapters-search", "fresh")
            eventually(lambda: ids(page) == ["fresh"])
            again = self.send(page, "fresh", sorted(folder.iterdir()))
            assert "version 1, which had this very content already" in again.inner_text()
        finally:
            served.http.delete("/v1/adapters/fresh?force=1")

    def test_every_reason_of_a_refusal(self, page, served, folder: Path) -> None:
        self.change(folder, fan_in_fan_out=True, use_bdlora=True)
        result = self.send(page, "fresh", sorted(folder.iterdir()))
        reasons = result.locator("li").all_inner_texts()
        config = json.loads((folder / "adapter_config.json").read_text())
        weights = (folder / "adapter_model.safetensors").read_bytes()
        named = f"sha256:{hashlib.sha256(weights).hexdigest()}"
        refused = served.post("/v1/adapters", id="fresh", config=config, weights=named)
        assert refused.status_code == 422
        details = refused.json()["error"]["details"]
        assert len(reasons) == len(details) >= 2
        for reason, detail in zip(reasons, details, strict=True):
            assert detail["message"] in reason
            assert detail["code"] in reason
        assert served.http.get("/v1/adapters/fresh").status_code == 404

    def test_an_id_that_is_none_is_not_sent(self, page, folder: Path) -> None:
        page.set_input_files("#files-input", sorted(folder.iterdir()))
        page.fill("#upload-id", "Not An Id")
        page.click("#upload-send")
        assert page.evaluate("document.getElementById('upload-id').validity.patternMismatch")
        assert page.locator("#upload-result").inner_text() == ""

    def test_a_folder_gives_its_name(self, page, folder: Path) -> None:
        page.set_input_files("#folder-input", folder)
        assert page.input_value("#upload-id") == "my-bot"
        assert "adapter_model.safetensors" in page.locator("#chosen").inner_text()

    def test_of_a_run_the_adapter_beside_its_checkpoints_is_taken(self, page, folder: Path) -> None:
        (folder / "checkpoint-50").mkdir()
        for path in list(folder.glob("adapter_*")):
            (folder / "checkpoint-50" / path.name).write_bytes(path.read_bytes() + b" ")
        page.set_input_files("#folder-input", folder)
        assert page.input_value("#upload-id") == "my-bot"
        assert "and its config" in page.locator("#chosen").inner_text()
        for path in list(folder.glob("adapter_*")):
            (folder / "checkpoint-60").mkdir(exist_ok=True)
            path.rename(folder / "checkpoint-60" / path.name)
        page.set_input_files("#folder-input", folder)
        assert "more than one adapter" in page.locator("#chosen").inner_text()

    @pytest.mark.parametrize("adds", [False, True])
    def test_a_tokenizer_that_adds_tokens_goes_with_it(
        self, page, served, model: Path, folder: Path, adds: bool
    ) -> None:
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        known = served.http.get("/tokenizer_info").json()["vocab_size"]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        own = {"id": known, "content": "<mood>", **flags}
        tokenizer["added_tokens"] += [own] if adds else []
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        with page.expect_request(lambda one: one.method == "POST" and one.url.endswith("/v1/adapters")) as asked:
            result = self.send(page, "worded", sorted(folder.iterdir()))
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        assert asked.value.post_data_json.get("tokenizer") == (f"sha256:{digest}" if adds else None)
        # This base has no row for another token.
        assert (f"names token {known}" in result.inner_text()) == adds
        served.http.delete("/v1/adapters/worded")

    def test_dropped_files(self, page, served, folder: Path) -> None:
        files = [[path.name, list(path.read_bytes())] for path in sorted(folder.iterdir())]
        page.evaluate(
            """(files) => { const transfer = new DataTransfer();
            for (const [name, bytes] of files) transfer.items.add(new File([Uint8Array.from(bytes)], name));
            for (const kind of ["dragenter", "dragover", "drop"])
              document.getElementById("drop").dispatchEvent(
                new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true })); }""",
            files,
        )
        page.locator("#chosen", has_text="and its config").wait_for()
        page.fill("#upload-id", "dropped")
        page.click("#upload-send")
        page.locator("#upload-result .note.ok").wait_for()
        digest = served.http.get("/v1/adapters/dropped").json()["digest"]
        try:
            assert digest == served.http.get("/v1/adapters/three").json()["digest"]
        finally:
            served.http.delete("/v1/adapters/dropped")

    def test_wrong_files(self, page, tmp_path: Path) -> None:
        (tmp_path / "adapter_model.bin").write_bytes(b"no")
        page.set_input_files("#files-input", tmp_path / "adapter_model.bin")
        assert "a pickle, which is never read" in page.locator("#chosen").inner_text()

    def test_our_own_hash_where_the_browser_lends_none(self, page) -> None:
        """What plain http to another machine would use, beside the browser's own."""
        ours, theirs = page.evaluate(
            """async () => { const { Sha256, sha256 } = await import("/console/hash.js");
            const bytes = Uint8Array.from({ length: 3_000_001 }, (_, i) => (i * 7919) >> 3);
            const sha = new Sha256(); sha.add(bytes.subarray(0, 17)); sha.add(bytes.subarray(17));
            return [[...sha.end()].map((b) => b.toString(16).padStart(2, "0")).join(""),
              await sha256(new File([bytes], "x"))]; }"""
        )
        assert ours == theirs
