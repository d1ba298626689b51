# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What is counted of compiled programs: beside XLA's own count, and on HLO as a GPU has it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.harness import inputs
from tpjax.pallas.bench import count_collectives, count_program
from tpjax.pallas.bench.hlo import Count, parse


def compiled(fn, *args):
    """Returns a compiled program."""
    return jax.jit(fn).lower(*args).compile()


@pytest.mark.parametrize(
    ("fn", "specs"),
    [
        (lambda x: x * 2 + 1, ("f32[64,32]",)),
        (lambda x, y: jnp.tanh(x @ y) @ y, ("f32[64,32]", "f32[32,32]")),
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), ("f32[4,64,32]", "f32[4,32,16]")),
        (lambda x: lax.dynamic_slice(x, (5, 0), (2, 32)) * 2, ("f32[64,32]",)),
    ],
    ids=["elementwise", "products", "batched", "slice"],
)
def test_bytes_are_those_that_xla_counts(fn, specs):
    """Where there is no loop XLA's own analysis sees the same traffic, and operations at least."""
    program = compiled(fn, *(inputs(spec, i) for i, spec in enumerate(specs)))
    count, known = count_program(program.as_text()), program.cost_analysis() or {}
    assert count.bytes == known["bytes accessed"]
    assert known["flops"] <= count.flops <= 1.1 * known["flops"] + 2048
    assert count.kernels == 0


def test_a_gather_reads_what_it_takes():
    """Two rows read and written, and two indices; not the table."""
    program = compiled(lambda x: x.at[jnp.array([3, 1])].get(mode="clip"), inputs("f32[64,32]", 0))
    assert count_program(program.as_text())[:2] == (1, 2 * 2 * 32 * 4 + 2 * 4)


def test_loops_count_as_often_as_they_run():
    """XLA's analysis counts one turn. Of what a turn slices, the slice is read."""

    def scan(x):
        return lax.scan(lambda c, row: (jnp.sin(c) * row, row.sum()), x[0], x)

    counts = [
        count_program(compiled(scan, inputs(f"f32[{n},4096]", 0)).as_text()) for n in (100, 200)
    ]
    ratio = [after / before for before, after in zip(*counts, strict=True) if before]
    assert ratio == pytest.approx([2.0] * 3, rel=0.05)
    turn = counts[1].bytes / 200
    assert 2 * 4 * 4096 < turn < 12 * 4 * 4096  # and not the 200 rows in each turn


def test_launches_are_what_xla_did_not_fuse():
    def chain(x):
        for _ in range(9):
            x = lax.optimization_barrier(jnp.sin(x))
        return x

    x = inputs("f32[512]", 0)
    assert count_program(compiled(chain, x).as_text())[:2] == (9, 9 * 2 * 4 * 512)


GPU = """\
HloModule jit_run, is_scheduled=true

%inner (p0: bf16[64,128], p1: bf16[128,256]) -> bf16[64,256] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = bf16[128,256]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,256]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%gemm_fusion (a: bf16[64,128], b: bf16[128,256]) -> bf16[64,256] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,256]{1,0} parameter(1)
  ROOT %nested = bf16[64,256]{1,0} fusion(%a, %b), kind=kCustom, calls=%inner
}

%in_place (buffer: f32[1000,8], row: f32[1,8], at: s32[]) -> f32[1000,8] {
  %buffer = f32[1000,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %twice = f32[1,8]{1,0} add(%row, %row)
  ROOT %dus = f32[1000,8]{1,0} dynamic-update-slice(%buffer, %twice, %at, %zero)
}

%small (s: f32[8]) -> f32[8] {
  %s = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%s)
}

%large (l: f32[8]) -> f32[8] {
  %l = f32[8]{0} parameter(0)
  %m = f32[8]{0} negate(%l)
  ROOT %o = f32[8]{0} exponential(%m)
}

%command_buffer (c0: bf16[64,128], c1: bf16[128,256]) -> bf16[64,256] {
  %c0 = bf16[64,128]{1,0} parameter(0)
  %c1 = bf16[128,256]{1,0} parameter(1)
  ROOT %gemm = bf16[64,256]{1,0} fusion(%c0, %c1), kind=kCustom, calls=%gemm_fusion, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
}

ENTRY %main (x: bf16[64,128], w: bf16[128,256], buf: f32[1000,8], r: f32[1,8], i: s32[]) -> f32[8] {
  %x = bf16[64,128]{1,0} parameter(0), metadata={op_name="x"}
  %w = bf16[128,256]{1,0} parameter(1)
  %buf = f32[1000,8]{1,0} parameter(2)
  %r = f32[1,8]{1,0} parameter(3)
  %i = s32[] parameter(4)
  %graph = bf16[64,256]{1,0} call(%x, %w), to_apply=%command_buffer
  %blas = (bf16[64,256]{1,0}, s8[4194304]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %ours = (bf16[64,256]{1,0}, /*index=1*/f32[64]{0}) custom-call(%x, %w), \
custom_call_target="mosaic_gpu_v2", api_version=API_VERSION_TYPED_FFI
  %put = f32[1000,8]{1,0} fusion(%buf, %r, %i), kind=kLoop, calls=%in_place
  %start = (f32[1,8]{1,0}, f32[1,8]{1,0:S(5)}, u32[]) copy-start(%r)
  %done = f32[1,8]{1,0:S(5)} copy-done(%start)
  %vec = f32[8]{0} bitcast(%r)
  ROOT %cond = f32[8]{0} conditional(%i, %vec, %vec), branch_computations={%small, %large}
}
"""


def test_a_program_as_a_gpu_has_it():
    """Products in Triton's and cuBLAS's hands, a kernel of ours, updates in place, branches."""
    product, operands = 2.0 * 64 * 256 * 128, 2 * (64 * 128 + 128 * 256)
    out = 2 * 64 * 256
    gemm = Count(1, operands + out, product, 0)
    ours = Count(1, operands + out + 4 * 64, 0, 1)
    put = Count(1, 4 * 8 + 4 + 4 * 8, 8, 0)
    copy = Count(1, 32 + 32 + 32 + 4, 0, 0)
    branch = Count(2, 4 * 32, 16, 0)
    assert count_program(GPU) == gemm + gemm + ours + put + copy + branch


def test_collectives_are_counted():
    text = GPU.replace("fusion(%buf, %r, %i), kind=kLoop, calls=%in_place", "all-gather(%buf)")
    text = text.replace("copy-start(%r)", "all-reduce-start(%r), to_apply=%small")
    assert count_collectives(GPU) == {}
    assert count_collectives(text) == {"all-gather": 1, "all-reduce": 1}


def test_names_with_or_without_a_percent():
    assert parse("ENTRY main (x: f32[2]) -> f32[2] {\n  ROOT y = f32[2]{0} parameter(0)\n}")[1] == (
        "main"
    )
