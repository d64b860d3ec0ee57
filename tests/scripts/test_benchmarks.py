"""The speed table: fits, targets and a run of the script on a tiny model."""

import json
import sys

import pytest

from dmx.errors import DmxError
from experiments.reporting.pages.large import large_page
from scripts.benchmarks import __main__ as bench
from scripts.benchmarks import kernels, large, peers, report, shapes, steps, targets


def test_exponents_are_slopes_in_logarithms_and_skip_what_is_missing():
    rows = [{"size": n, "seconds": 3 * n**1.5} for n in (1, 2, 4)]
    assert report.exponent(rows, "seconds") == "1.50"
    assert report.exponent([*rows, {"size": 8, "seconds": None}], "seconds") == "1.50"
    assert report.exponent(rows[:1], "seconds") == "-"


def test_a_target_takes_the_worst_value_and_says_what_is_not_measured():
    assert targets.check_of("a", [0.95, 0.89], 0.9, at_least=True)[2:] == ["0.89", "missed"]
    assert targets.check_of("a", [1.0, 1.4], 1.5, at_least=False)[2:] == ["1.40", "met"]
    assert targets.check_of("a", [], 1.5, at_least=False)[2:] == ["not measured", "-"]
    assert targets.check_of("a", [1.0, float("nan")], 1.5, at_least=False)[3] == "-"


def test_the_report_is_made_again_from_the_kept_numbers(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "--out", str(tmp_path), *arguments])
        bench.main()

    run("--tiny", "--device", "cpu", "--only", "scans", "steps")
    text = (tmp_path / "bench.md").read_text()
    kept = json.loads((tmp_path / "bench.json").read_text())["cpu"]
    assert set(kept) == {"scans", "steps"}
    assert {row["search"] for row in kept["scans"]["rows"]} >= {"kl", "fisher"}
    assert all(row["search_seconds"] > 0 for row in kept["steps"]["rows"])
    assert "| tiny | 2 x 32 | kl |" in text and "not measured" in capsys.readouterr().out
    (tmp_path / "bench.md").unlink()
    run("--report")
    assert (tmp_path / "bench.md").read_text() == text
    row = kept["steps"]["rows"][0] | {"search_seconds": None, "search_mib": None, "graph": None}
    kept["steps"]["rows"] = [row]
    assert "out of memory" in report.report({"cpu": kept})


def test_a_step_that_cannot_be_captured_is_a_row_with_the_reason():
    asked = {"objective": "kl", "gradient_checkpointing": True, "cuda_graph": "on"}
    wrong = {"objective": "kl", "penalty": "none"}
    model = shapes.make_model(shapes.TINY, "cpu")
    rows = steps.compare_steps(model, shapes.TINY, 1, 8, "cpu", 1, [asked, wrong])
    refused = next(rows)
    assert "the model is on cpu" in refused["reason"]
    (line,) = report.steps_table([refused])[2:3]
    assert "| kl, checkpointing in a graph |" in line and "the model is on cpu" in line
    with pytest.raises(DmxError, match="penalty"):
        next(rows)


def test_other_libraries_are_timed_and_those_that_are_missing_say_why(monkeypatch):
    monkeypatch.setattr(
        peers,
        "PEERS",
        {
            "torch": lambda x: [
                kernels.Case("mxfp4", lambda x, other, out: x + 0, 1.0),
                kernels.Case("mxfp8_e4m3", lambda x, other, out: x.no_such(), 1.0),
            ],
            "numpy": lambda x: 1 / 0,
            "no-such-library": lambda x: [],
        },
    )
    rows = bench.peers("cpu", True)
    told = {(r["library"].partition(" ")[0], r["format"]): (r["ms"], r["reason"]) for r in rows}
    assert told["torch", "mxfp4"][0] > 0 and told["torch", "mxfp4"][1] is None
    assert told["torch", "mxfp8_e4m3"][0] is None
    assert "no_such" in told["torch", "mxfp8_e4m3"][1]
    assert told["numpy", "mxfp4"] == (None, "ZeroDivisionError: division by zero")
    assert told["no-such-library", "mxfp4"] == (None, "not installed")
    text = report.report({"cpu": {"peers": {"machine": {"name": "here"}, "rows": rows}}})
    assert "| no-such-library | mxfp4 | not installed | - | - |" in text


def test_runs_of_other_machines_and_environments_are_merged():
    def peer(library, ms, where):
        return {
            "size": "64",
            "dtype": "float32",
            "library": library,
            "format": "mxfp4",
            "ms": ms,
            "x_copy": ms,
            "x_ours": ms,
            "reason": "not installed",
            "where": where,
        }

    def section(name, rows):
        return {"machine": {"name": name}, "rows": rows}

    body = {
        "cpu": {
            "kernels": section("old", []),
            "peers": section(
                "a", [peer("x 1", 2.0, "a"), peer("y", None, "a"), peer("z 1", 4.0, "a")]
            ),
        }
    }
    bench.merge(body, {"cpu": {"kernels": section("new", [])}, "cuda": {"scans": section("c", [])}})
    bench.merge(
        body,
        {
            "cpu": {
                "peers": section(
                    "b",
                    [
                        peer("x 2", 3.0, "b"),
                        peer("y 1", 5.0, "b"),
                        peer("z", None, "b"),
                    ],
                )
            }
        },
    )
    rows = body["cpu"]["peers"]["rows"]
    # A newer time replaces an older one and a reason; a reason replaces no time.
    assert [(r["library"], r["ms"], r["where"]) for r in rows] == [
        ("x 2", 3.0, "b"),
        ("y 1", 5.0, "b"),
        ("z 1", 4.0, "a"),
    ]
    text = report.report(body)
    assert text.index("## GPU") < text.index("## CPU") and "new." in text and "old" not in text


def test_the_whole_path_of_a_large_model_writes_a_row_a_stage(tmp_path, monkeypatch):
    out = tmp_path / "large.json"
    for memory, stages in (("block", ["fisher", "search", "learn"]), ("all", ["export"])):
        given = ["--shape", "tiny", "--memory", memory, "--steps", "2", "--json", str(out)]
        monkeypatch.setattr(sys, "argv", ["large", *given, "--stages", *stages])
        large.main()
    record = json.loads(out.read_text())
    by_block, whole = record["runs"]
    assert [row["stage"] for row in by_block["stages"]] == ["make", "fisher", "search", "learn"]
    assert [row["stage"] for row in whole["stages"]] == ["make", "export"]
    rows = [*by_block["stages"], *whole["stages"]]
    assert all(row["seconds"] > 0 and "failed" not in row for row in rows)
    assert all(row["copied_gb"] > 0 for row in by_block["stages"][1:])
    text = large_page({"large_here": record})
    assert "learned weights, 2 steps of each block" in text and "held block by block" in text
    assert f"| {whole['stages'][1]['seconds']:.1f} |" in text


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--json", "/proc/none/large.json"], "cannot write /proc/none"),
        (["--json", "{other}"], "is no record of this benchmark"),
        (["--json", "{damaged}"], "damaged.json has no list `runs`"),
    ],
)
def test_a_path_that_cannot_be_recorded_is_refused(wrong, why, tmp_path, monkeypatch, capsys):
    files = {"other": "dmx.growth/1", "damaged": large.SCHEMA}
    paths = {name: tmp_path / f"{name}.json" for name in files}
    for name, schema in files.items():
        paths[name].write_text(json.dumps({"schema": schema}))
    given = ["--json", str(tmp_path / "large.json"), *(a.format(**paths) for a in wrong)]
    monkeypatch.setattr(sys, "argv", ["large", *given])
    with pytest.raises(SystemExit):
        large.parse("cpu")
    assert why in capsys.readouterr().err
