"""The page of results: every file a section, its rows, and the pictures that its columns allow."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from streamattn import cli

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "docs" / "measurements" / "attention_h200.csv"
MODELS = """device,shape,work,batch,dtype,mode,warmup,seq_len,contestant,status,tokens_per_s
H100,gpt2-small,train,4,bfloat16,eager,5,128,sdpa,ok,1000.5
H100,gpt2-small,train,4,bfloat16,eager,5,256,sdpa,ok,2000
H100,gpt2-small,train,4,bfloat16,eager,5,256,eager,out of memory,
"""
MEMORY = """device,shape,batch,dtype,seq_len,contestant,step_peak_mib
CPU,s,1,float32,16,sdpa,10
CPU,s,1,float32,32,sdpa,20
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
    files.append(Path(shutil.copy(KERNELS, tmp_path / "kernels.csv")))
    out = tmp_path / "out"
    assert report("--out", str(out), *map(str, files), "--peak", "786", "--bandwidth", "3020") == 0
    assert capsys.readouterr().out.strip() == str(out / "report.md")
    page = (out / "report.md").read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["models", "memory", "comm", "kernels"]
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert len(pictures) == 3 + 8 + 1
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
    with pytest.raises(SystemExit):
        report("--out", str(tmp_path / "o"), str(empty), "--peak", "7")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"^streamattn bench report: needs matplotlib.*streamattn\[bench\]"):
        report("--out", str(tmp_path / "o"), str(KERNELS))
    assert not (tmp_path / "o").exists()
