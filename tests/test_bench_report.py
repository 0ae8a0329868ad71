"""The page of results: every file a section, its rows, and the pictures that its columns allow."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas
import pytest

from streamattn import cli
from streamattn.bench import report as module
from streamattn.bench.report import draw

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "docs" / "measurements" / "attention_h200.csv"
MODELS = """device,shape,layers,work,batch,dtype,mode,warmup,seq_len,contestant,status,tokens_per_s
H100,gpt2-small,,train,4,bfloat16,eager,5,128,sdpa,ok,1000.5
H100,gpt2-small,,train,4,bfloat16,eager,5,256,sdpa,ok,2000
H100,gpt2-small,,train,4,bfloat16,eager,5,256,eager,out of memory,
"""
MEMORY = """device,shape,layers,batch,dtype,seq_len,contestant,forward_peak_mib,step_peak_mib
CPU,s,2,1,float32,16,sdpa,8,10
CPU,s,2,1,float32,32,sdpa,9,20
CPU,s,4,1,float32,32,sdpa,10,40
"""
COMM = """device,operation,backend,world_size,megabytes,bus_gb_s
CPU,all_reduce,gloo,2,1,0.5
CPU,all_reduce,gloo,2,8,0.75
"""


def report(*arguments: str) -> int:
    return cli.main(["bench", "report", *arguments])


def test_one_page_of_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = []
    for name, text in (("models", MODELS), ("memory", MEMORY), ("comm", COMM)):
        files.append(tmp_path / f"{name}.csv")
        files[-1].write_text(text)
    files.append(tmp_path / "kernels.csv")
    kernels = pandas.read_csv(KERNELS)
    kernels[(kernels["head_dim"] == 64) & kernels["causal"]].to_csv(files[-1], index=False)
    out = tmp_path / "out"
    assert report("--out", str(out), *map(str, files)) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.md")
    page = (out / "report.md").read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["models", "memory", "comm", "kernels"]
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert pictures[:4] == [
        "models-tokens_per_s-gpt2-small-train-batch_4-bfloat16-eager-warmup_5.png",
        "memory-forward_peak_mib-s-layers_2-batch_1-float32.png",
        "memory-step_peak_mib-s-layers_2-batch_1-float32.png",
        "comm-gloo-2.png",
    ], "four layers have one length and no line"
    assert len(pictures) == 4 + 2 * 2
    for name in pictures:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "| 256 | eager | out of memory |  |" in page
    assert "| 128 | sdpa | ok | 1000.5 |" in page
    assert "device H100, shape gpt2-small, work train, batch 4" in page


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = tmp_path / "empty.csv"
    empty.write_text("a,b\n")
    for file, why in ((tmp_path / "none.csv", "can't read"), (empty, "has no row")):
        with pytest.raises(SystemExit, match=why):
            report("--out", str(tmp_path / "o"), str(file))


def test_a_roofline_is_drawn_where_the_machine_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = dict(
        case="single", dtype="tf32", head_dim=64, causal=True, part="both", timer="graph", provider="a"
    )
    rows = [row | dict(seq_len=n, flop_per_byte=n / 4, tflops=n / 100, gb_s=40.0) for n in (128, 256)]
    frame = pandas.DataFrame(rows).assign(peak_share=0.1, copy_share=0.2, peak_mib=1.5)
    path = tmp_path / "x.csv"
    frame.to_csv(path)
    drawn = [Path(each).name for each in draw(str(path), str(tmp_path / "new" / "folder"))]
    stem = "x-single-both-graph-tf32"
    assert drawn == [f"{stem}-64-causal.png", f"{stem}-64-causal-memory.png", f"{stem}-roofline.png"]


def test_without_files_it_shows_those_that_are_checked_in(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "draw", lambda file, folder: [])
        assert report("--out", str(tmp_path)) == 0
    sections = re.findall(r"^## (.+)$", (tmp_path / "report.md").read_text(), re.MULTILINE)
    assert sections == sorted(path.stem for path in (ROOT / "docs" / "measurements").glob("*.csv"))


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"^streamattn bench report: needs matplotlib.*streamattn\[bench\]"):
        report("--out", str(tmp_path / "o"), str(KERNELS))
    assert not (tmp_path / "o").exists()
