"""The C kernels: each against plain arithmetic in torch, and the whole decoder through the engine's tests."""

import ctypes
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.native.build import BuildFailed, library_path

SOURCES = Path(__file__).parents[3] / "engines" / "native" / "src"

# Small functions around the sources' static ones, so that they can be called alone.
PROBES = """
#include "model.c"
typedef struct { Pool *pool; _Atomic long long sum; _Atomic int seen[4096]; } Sum;
static void add(void *argument, int index, int thread) {
    (void)thread;
    Sum *s = argument;
    atomic_fetch_add(&s->sum, index);
    atomic_fetch_add(&s->seen[index], 1);
}
/* 0 when every index of many loops was visited exactly once */
int probe_pool(int threads, int loops) {
    Pool *pool = pool_new(threads);
    int wrong = 0;
    Sum *s = calloc(1, sizeof *s);
    for (int l = 0; l < loops; l++) {
        int count = l * 37 % 4096;
        pool_run(pool, count, add, s);
        for (int i = 0; i < 4096; i++) {
            wrong += atomic_load(&s->seen[i]) != (i < count);
            atomic_store(&s->seen[i], 0);
        }
    }
    free(s);
    pool_free(pool);
    return wrong;
}
void probe_exp(const float *x, float *y) { vf_store(y, vf_exp(vf_load(x))); }
void probe_bf16(const float *x, uint16_t *y, int count) { for (int i = 0; i < count; i++) y[i] = to_bf16(x[i]); }
/* amx: 1 as the machine has it, 0 never */
void probe_gemm(const void *w, const void *x, float *y, int n, int k, int m, int is_bf16, int amx, int threads) {
    use_amx = amx && HAVE_AMX && amx_request();
    Packed packed;
    pack_new(&packed, n, k, is_bf16);
    pack_rows(&packed, 0, 16, n, w);
    size_t rows = ROUND_UP(m, ROWS) + ROWS;
    char *input = big_alloc(rows * packed.k_pad * 4);
    float *output = big_alloc(rows * packed.n_pad * 4);
    for (int r = 0; r < m; r++)
        for (int c = 0; c < k; c++)
            if (is_bf16) ((bf16 *)input)[x_at(r, c, packed.k_pad)] = ((const bf16 *)x)[(size_t)r * k + c];
            else ((float *)input)[(size_t)r * packed.k_pad + c] = ((const float *)x)[(size_t)r * k + c];
    Pool *pool = pool_new(threads);
    gemm(pool, &packed, input, output, m);
    amx_release();
    pool_free(pool);
    for (int r = 0; r < m; r++) memcpy(y + (size_t)r * n, output + (size_t)r * packed.n_pad, (size_t)n * 4);
    big_free(packed.data, packed_bytes(&packed));
    big_free(input, rows * packed.k_pad * 4);
    big_free(output, rows * packed.n_pad * 4);
}
"""


def _compile(folder: Path, *flags: str) -> ctypes.CDLL:
    source = folder / "probes.c"
    source.write_text(PROBES)
    target = folder / "probes.so"
    flags = ("-O3", "-Wall", "-shared", "-fPIC", "-pthread", f"-I{SOURCES}", *flags)
    subprocess.run(["cc", *flags, "-o", target, source, "-lm"], check=True, capture_output=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module", params=["native", "baseline"])
def probes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Built for this machine, and for the oldest that has 64 bits: the portable paths must not rot."""
    flags = ["-march=native"] if request.param == "native" else []
    return _compile(tmp_path_factory.mktemp(f"probes-{request.param}"), *flags)


def test_every_item_of_a_loop_is_done_once(probes: ctypes.CDLL) -> None:
    for threads in (1, 2, 5):
        assert probes.probe_pool(threads, 600) == 0


def test_exp_is_accurate_and_keeps_the_special_values(probes: ctypes.CDLL) -> None:
    values = [0, 1, -1, 0.5, -0.3, 10, -10, -86.9, -87.5, -200, -math.inf, 80, 1e-8, -1e-8, 3, math.nan]
    x = np.array(values, np.float32)
    y = np.empty(16, np.float32)
    probes.probe_exp(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_allclose(y[:-1], np.exp(x[:-1].astype(np.float64)), rtol=2e-7, atol=2.0**-126)
    assert y[10] == 0
    assert math.isnan(y[-1])


def test_rounding_to_bfloat16_is_torchs(probes: ctypes.CDLL) -> None:
    special = [0.0, -0.0, math.inf, -math.inf, 1.00390625, 1.01171875, 3.3e38, 1e-40]
    x = torch.cat([torch.randn(4000) * 10.0 ** torch.randint(-20, 20, (4000,)), torch.tensor(special)])
    y = np.empty(len(x), np.uint16)
    probes.probe_bf16(ctypes.c_void_p(x.data_ptr()), y.ctypes.data_as(ctypes.c_void_p), len(x))
    assert torch.equal(torch.from_numpy(y.view(np.int16)).view(torch.bfloat16), x.bfloat16())


def _gemm(probes: ctypes.CDLL, w: torch.Tensor, x: torch.Tensor, *, amx: bool = True, threads: int = 2) -> torch.Tensor:
    y = torch.empty(x.shape[0], w.shape[0])
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (w, x, y)]
    is_bf16 = w.dtype == torch.bfloat16
    probes.probe_gemm(*pointers, w.shape[0], w.shape[1], x.shape[0], int(is_bf16), int(amx), threads)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (96, 576), (100, 48), (17, 33), (1536, 32)])
def test_gemm_equals_a_product_in_float64(probes: ctypes.CDLL, dtype: torch.dtype, n: int, k: int) -> None:
    w, inputs = torch.randn(n, k).to(dtype), torch.randn(600, k).to(dtype)
    for m in (1, 2, 15, 16, 17, 33, 70, 600):
        expected = inputs[:m].double() @ w.double().t()
        for amx in (True, False):
            found = _gemm(probes, w, inputs[:m], amx=amx).double()
            assert ((found - expected).norm() / expected.norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_others(probes: ctypes.CDLL, dtype: torch.dtype) -> None:
    w, x = torch.randn(96, 160).to(dtype), torch.randn(600, 160).to(dtype)
    for amx in (True, False):
        together = _gemm(probes, w, x, amx=amx)
        for rows in ([0], [3, 5], list(range(16)), list(range(40, 77)), [599]):
            assert torch.equal(_gemm(probes, w, x[rows].contiguous(), amx=amx, threads=1), together[rows])


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildFailed, match=r"no C compiler was found \(cc, gcc, clang\)"):
        library_path(tmp_path)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cc: error: out of order' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BuildFailed, match="cc failed: cc: error: out of order"):
        library_path(tmp_path / "cache")


def test_the_library_is_built_once(tmp_path: Path) -> None:
    first = library_path(tmp_path)
    built = first.stat().st_mtime_ns
    assert library_path(tmp_path) == first
    assert first.stat().st_mtime_ns == built
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
