"""Commands upload, list, show and rm."""

import json

from answers import failed


def test_upload_show_list_rm(run, server, make_adapter) -> None:
    folder = make_adapter()
    (folder / "training_args.bin").write_bytes(b"x")
    done = run("upload", folder, "--id", "mia")
    assert done.code == 0
    assert done.out.startswith("registered mia@1  ")
    assert "4 of 4 modules matched in 2 layers, rank 2, scaling 2, F32" in done.out
    notes = ("not used: training_args.bin", "hashing done", "sending done")
    assert [note for note in notes if note not in done.err] == []
    assert run("upload", folder, "--id", "mia").out.startswith("unchanged: mia@1")
    [row] = run("list").out.splitlines()
    assert row.split("\t")[:2] == ["mia", "1"]
    assert "version 1: " in run("show", "mia").out
    assert run("rm", "mia").out == "removed mia (1 version)\n"
    gone = run("show", "mia")
    failed(gone, 1)
    assert gone.err == "lorasrv: adapter 'mia' does not exist\n"


def test_json(run, make_adapter) -> None:
    done = json.loads(run("upload", make_adapter(), "--id", "mia", "--json").out)
    assert (done["version"], done["report"]["modules_matched"]) == (1, 4)
    assert [a["id"] for a in json.loads(run("list", "--json").out)] == ["mia"]
    assert json.loads(run("show", "mia", "--json").out)["digest"] == done["digest"]
    assert json.loads(run("rm", "mia@1", "--json").out)["deleted"]


def test_what_a_version_or_an_alias_is_no_name_for(run, make_adapter) -> None:
    run("upload", make_adapter("1", seed=1), "--id", "mia")
    failed(run("show", "mia@1"), 1, "an id is expected, not 'mia@1'; 'mia' has version 1\n")
    run("upload", make_adapter("2", seed=2), "--id", "mia", "--alias", "next")
    for command in ("show", "limit", "rollback", "alias"):
        for reference in ("mia@2", "mia@77", "mia:next") if command != "alias" else ("mia@2",):
            says = f"an id is expected, not '{reference}'; 'mia' has versions 1, 2; its aliases: next\n"
            failed(run(command, reference), 1, says)
    for command in ("pin", "unpin", "warm", "verify", "defaults", "rm"):
        failed(run(command, "mia@77"), 1, "adapter 'mia' has no version 77; it has 1, 2\n")


def test_refused_with_every_reason(run, make_adapter) -> None:
    done = run("upload", make_adapter(use_bdlora=True, fan_in_fan_out=True), "--id", "mia")
    failed(done, 1, "lorasrv: the adapter is refused", "use_bdlora", "fan_in_fan_out")


def test_if_not_exists(run, make_adapter) -> None:
    done = [run("upload", make_adapter(), "--id", "mia", "--if-not-exists") for _ in range(2)]
    assert done[0].code == 0
    failed(done[1], 1, "adapter 'mia' exists, and only a new id was asked for")


def test_no_adapter_in_the_folder(run, tmp_path) -> None:
    refused = run("upload", tmp_path, "--id", "mia")
    assert (refused.code, refused.err.count("\n")) == (1, 2)
    # The whole path: the working directory may be another one than was thought.
    failed(run("upload", tmp_path / "nowhere", "--id", "mia"), 2, f"'{tmp_path / 'nowhere'}' does not exist")


def test_an_aliased_version_needs_force(run, server, make_adapter) -> None:
    for seed in (1, 2):
        assert run("upload", make_adapter(str(seed), seed=seed), "--id", "mia", "--alias", "prod").code == 0
    assert server.http.get("/v1/adapters/mia").json()["aliases"] == {"prod": 2}
    failed(run("rm", "mia@2"), 1, "while aliases point to it (mia:prod)")
    assert run("rm", "mia@2", "--force").out == "removed mia@2 (1 version)\nremoved mia:prod\n"


def test_rm_of_several(run, make_adapter) -> None:
    for name in ("Org Mia", "tom"):
        assert run("upload", make_adapter(name)).code == 0
    done = run("rm", "org-mia", "nobody", "tom")
    assert (done.code, done.out) == (1, "removed org-mia (1 version)\nremoved tom (1 version)\n")
    assert done.err == "lorasrv: 1 of 3 were not removed\n  adapter 'nobody' does not exist\n"


def test_a_partial_adapter(run, make_adapter) -> None:
    folder = make_adapter(target_modules=["q_proj", "v_proj", "down_proj"])
    failed(run("upload", folder, "--id", "mia"), 1, "(partial_adapter)", "lorasrv upload --allow-partial")
    done = run("upload", folder, "--id", "mia", "--allow-partial")
    assert done.code == 0
    assert all(words in done.out for words in ("4 of 6 modules matched", "warning: partial: 2 of 6 targeted modules"))
    assert "4 of 6 modules matched" in run("show", "mia").out
