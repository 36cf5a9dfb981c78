// Stands before the compiler's own header where kernels are built for instructions that the machine
// need not have: what they use of AVX-512, its bf16 products, VNNI and AMX is then computed with AVX2,
// FMA and F16C. For tests.
//
// The kernels live in namespaces inside `onestem`, so the functions of that name hide the
// compiler's. An instruction that is used but not emulated does not compile: the compiler's own
// function asks for an instruction set that is not enabled.
#pragma once

#include_next <immintrin.h>

// Compilers have some of them as macros.
#undef _mm512_and_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_cmple_epi32_mask
#undef _mm512_cmplt_epi32_mask
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x8_ps
#undef _mm512_insertf32x4
#undef _mm512_reduce_ps
#undef _mm512_scalef_ps
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _mm512_ternarylogic_epi32
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_release
#undef _tile_stored
#undef _tile_zero

#include "emulate/avx512.h"

#include "emulate/bf16.h"

#include "emulate/vnni.h"

#include "emulate/amx.h"
