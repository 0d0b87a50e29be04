"""`ggml-sched pack`: output, written files, and errors for bad files."""

import csv
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import run_python

from ggml_sched import FileFormatError
from ggml_sched.cli import main
from ggml_sched.cli.pack import read

HARD = Path(__file__).parents[1] / "data" / "packing" / "C.1048576.csv"


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_file_is_packed_and_the_offsets_written(tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert main(["pack", str(HARD), "--capacity", "1048576", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "203 buffers" in said and "joined buffers" in said
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 203
    assert all(0 <= int(r["offset"]) <= 1048576 - int(r["size"]) for r in rows)


def test_columns_are_found_by_name_in_any_order(tmp_path, capsys):
    path = write(tmp_path / "x.csv", "size,name,upper,lower\r\n10,a,2,0\r\n\r\n 20 ,b,3,-1\r\n")
    assert main(["pack", path, "--out", "-"]) == 0
    said = capsys.readouterr()
    assert said.out == "size,name,upper,lower,offset\n10,a,2,0,0\n 20 ,b,3,-1,10\n"
    assert "arena   30 bytes" in said.err and "optimal yes" in said.err


def test_a_capacity_that_is_missed_has_its_own_exit_code(tmp_path, capsys):
    path = write(tmp_path / "x.csv", "id,lower,upper,size\n0,0,2,10\n1,1,3,10\n")
    assert main(["pack", path, "--capacity", "19"]) == 3
    assert "misses  the capacity of 19 bytes by 1: more bytes are alive at once" in capsys.readouterr().out
    assert main(["pack", path, "--capacity", "20"]) == 0
    assert "misses" not in capsys.readouterr().out


def test_a_header_alone_is_an_empty_problem(tmp_path, capsys):
    assert main(["pack", write(tmp_path / "x.csv", "lower,upper,size\n")]) == 0
    assert "0 buffers" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "words"), [
    ("", "empty"),
    ("id,lower,upper\n0,1,2\n", "size"),
    ("lower,upper,size,size\n0,1,2,2\n", "size"),
    ("lower,upper,size\n0,1\n", "row 2 has 2 fields"),
    ("lower,upper,size\n0,1,x\n", "row 2: size is not an integer"),
    ("lower,upper,size\n0,1,1.5\n", "not an integer"),
    ("lower,upper,size\n0,1,1_000\n", "not an integer"),
    ("lower,upper,size\n0,1,٣\n", "not an integer"),
    ("lower,upper,size\n0,1," + "9" * 5000 + "\n", "not an integer"),
    ("lower,upper,size\n2,1,5\n", "make no sense"),
    ("lower,upper,size\n1,2,-5\n", "make no sense"),
    ("lower,upper,size\n0,1,9223372036854775807\n0,1,1\n", "63 bits"),
    ("lower,upper,size\n0,1,99999999999999999999\n", "row 2: 99999999999999999999 bytes do not fit into 63 bits"),
    ('lower,upper,size\n0,1,"5\n', "CSV"),
    (b"lower,upper,size\n0,1,\xff\n", "CSV"),
    (b"\x00\x01\x02", "header"),
])
def test_a_bad_file_is_refused_with_one_line(tmp_path, capsys, text, words):
    assert main(["pack", write(tmp_path / "bad.csv", text)]) == 1
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""
    assert "bad.csv: " in said.err


def test_a_negative_capacity_or_budget_is_an_error(tmp_path, capsys):
    path = write(tmp_path / "x.csv", "id,lower,upper,size\n0,0,2,10\n")
    for option in ("capacity", "budget"):
        assert main(["pack", path, f"--{option}", "-1"]) == 1
        said = capsys.readouterr()
        assert f"{option} -1 is negative" in said.err and said.out == ""


def test_a_missing_file_and_a_folder_are_errors(tmp_path, capsys):
    assert main(["pack", str(tmp_path / "none.csv")]) == 1
    assert main(["pack", str(tmp_path)]) == 1
    assert main(["pack", str(HARD), "--budget", "-1"]) == 1


def test_errors_are_typed_for_callers(tmp_path):
    with pytest.raises(FileFormatError):
        read(write(tmp_path / "bad.csv", "a,b\n"))


def test_it_runs_as_a_module():
    assert "bound   1039360 bytes" in run_python("-m", "ggml_sched.cli.pack", str(HARD), "--budget", "0").stdout


def test_an_interrupt_ends_a_search():
    rng = random.Random(1)
    starts = [rng.randrange(10**6) for _ in range(20000)]
    rows = [f"{start},{start + rng.randrange(1, 10**4)},{rng.randrange(10**6)}" for start in starts]
    with subprocess.Popen([sys.executable, "-m", "ggml_sched", "pack", "-", "--budget", str(10**12)], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            process.stdin.write("\n".join(["lower,upper,size", *rows]))      # more than a pipe holds: it is being read
            process.stdin.close()
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
            assert process.stdout.read() + process.stderr.read() == ""
        finally:
            process.kill()
