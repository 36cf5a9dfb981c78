// Products of many rows with weights of 8 and 4 bits by tiles (AMX). Weights are the left operand, 16
// outputs to a tile as they stand; rows the right one, 16 to a panel. Bytes of channels are multiplied
// where they are. Values of groups become bf16 in a buffer first, and rows are bf16.
#pragma once

namespace onestem::ONESTEM_ISA {

constexpr int32_t kTileBytes = 1024;
// Inputs that a pass over the rows takes, as bytes of an output's row: a pair of blocks then lies in
// the first-level cache.
constexpr int32_t kPassBytes = 1024;
// Of rows, and of sums: a share of the second-level cache.
constexpr int64_t kRowsFit = 1 << 20, kSumsFit = 1 << 19;

inline int32_t num_panels(const LinearCall& call) {
  return static_cast<int32_t>((call.rows + 15) / 16);
}

// What the two ways share. `Way` has kSteps, tiles of a chunk; `left`, which gives the tiles of a pair's
// next inputs; `multiply`; and `finish`.
template <class Way>
struct LinearAmx {
  static int64_t tiles(const PackedCodes& w) { return int64_t{w.chunks} * Way::kSteps; }
  static size_t panel_bytes(const PackedCodes& w) {
    return tiles(w) * kTileBytes + 2 * 16 * sizeof(float);
  }
  static char* panel_at(const LinearCall& call, int32_t panel) {
    return call.packed + panel * panel_bytes(call.weight);
  }
  // Behind the tiles: 16 scales, and 16 numbers that a zero of 1 takes off.
  static float* scales_of(const LinearCall& call, int32_t panel) {
    return reinterpret_cast<float*>(panel_at(call, panel) + tiles(call.weight) * kTileBytes);
  }

  // Rows that do not fit the cache are read once for several pairs.
  static int32_t pairs(const LinearCall& call) {
    const int64_t panels = num_panels(call);
    if (panels * static_cast<int64_t>(panel_bytes(call.weight)) <= kRowsFit) return 4;
    return larger(1, smaller(16, static_cast<int32_t>(kSumsFit / (panels * 2 * kTileBytes))));
  }
  static size_t sums_bytes(const LinearCall& call) {
    return size_t{2 * kTileBytes} * pairs(call) * (num_panels(call) + 1);
  }
  static size_t scratch_bytes(const LinearCall& call) {
    const size_t rows = tiles(call.weight) * kTileBytes, own = sums_bytes(call) + Way::buffer_bytes();
    return rows > own ? rows : own;
  }

  template <class T>
  static void multiply(const LinearCall& call, int32_t begin, int32_t end, char* scratch) {
    const PackedCodes& w = call.weight;
    const int32_t step = Way::kPassChunks, panels = num_panels(call);
    char* buffer = scratch + sums_bytes(call);
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
    for (int32_t c = 0; c < w.chunks; c += step) {
      const int32_t count = smaller(step, w.chunks - c);
      for (int32_t pair = begin; pair < end; ++pair) {
        const char* left = Way::left(w, pair, c, count, buffer);
        char* sums = scratch + int64_t{pair - begin} * 2 * kTileBytes * (panels + 1);
        const int64_t block = Way::left_stride(w);
        finish_stores();
        for (int32_t p = 0; p < panels; p += 2) {
          const char* rows = panel_at(call, p) + int64_t{c} * Way::kSteps * kTileBytes;
          char* to = sums + p * 2 * kTileBytes;
          const int32_t n = count * Way::kSteps;
          if (p + 1 < panels) {
            pass<2>(left, block, rows, panel_bytes(w), n, c == 0, to);
          } else {
            pass<1>(left, block, rows, 0, n, c == 0, to);
          }
        }
      }
    }
    _tile_release();
    // Row by row, so that few pages are written at a time.
    for (int32_t p = 0; p < panels; ++p) {
      for (int32_t pair = begin; pair < end; ++pair) {
        const char* sums = scratch + int64_t{pair - begin} * 2 * kTileBytes * (panels + 1);
        for (int32_t b = 0; b < 2; ++b) {
          const char* at = sums + (p / 2 * 4 + b * 2 + p % 2) * kTileBytes;
          Way::template finish<T>(call, 2 * pair + b, p, at);
        }
      }
    }
  }

 private:
  // Two blocks times one or two panels; `n` tiles deep.
  template <int PANELS>
  static void pass(const char* left, int64_t block, const char* rows, int64_t panel, int32_t n,
                   bool first, char* sums) {
    if (first) {
      _tile_zero(0);
      _tile_zero(2);
      if constexpr (PANELS == 2) {
        _tile_zero(1);
        _tile_zero(3);
      }
    } else {
      _tile_loadd(0, sums, 64);
      _tile_loadd(2, sums + 2 * kTileBytes, 64);
      if constexpr (PANELS == 2) {
        _tile_loadd(1, sums + kTileBytes, 64);
        _tile_loadd(3, sums + 3 * kTileBytes, 64);
      }
    }
    for (int32_t i = 0; i < n; ++i, left += kTileBytes, rows += kTileBytes) {
      _tile_loadd(4, left, 64);
      _tile_loadd(6, rows, 64);
      Way::template dot<0>();
      if constexpr (PANELS == 2) {
        _tile_loadd(7, rows + panel, 64);
        Way::template dot<1>();
      }
      _tile_loadd(5, left + block, 64);
      Way::template dot<2>();
      if constexpr (PANELS == 2) Way::template dot<3>();
    }
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + 2 * kTileBytes, 64);
    if constexpr (PANELS == 2) {
      _tile_stored(1, sums + kTileBytes, 64);
      _tile_stored(3, sums + 3 * kTileBytes, 64);
    }
  }
};

// Sixteen rows of `words` 32-bit words, `stride` apart, as columns.
inline void pack_columns(const uint32_t* from, int64_t stride, int64_t words, char* to) {
  const float* in = reinterpret_cast<const float*>(from);
  float* out = reinterpret_cast<float*>(to);
  for (int64_t d = 0; d < words; d += 8) {
    transpose8(in + d, stride, out + d * 16, 16);
    transpose8(in + d + 8 * stride, stride, out + d * 16 + 8, 16);
  }
}

// Sums [16 outputs][16 rows], to the rows.
template <class T>
inline void store_columns(const LinearCall& call, int32_t block, int32_t panel, const float* sums,
                          bool scaled) {
  alignas(64) float rows[16][16];
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 16; j += 8) transpose8(sums + i * 16 + j, 16, &rows[j][i], 16);
  }
  const int64_t first = int64_t{panel} * 16;
  const int64_t count = call.rows - first < 16 ? call.rows - first : 16;
  for (int64_t i = 0; i < count; ++i) {
    store_sixteen<T>(call, first + i, block * 16, rows[i], scaled);
  }
}

struct AmxChannels : LinearAmx<AmxChannels> {
  static constexpr int32_t kSteps = 1;
  static constexpr int32_t kPassChunks = kPassBytes / kCodeBytes;

  static size_t buffer_bytes() { return 64; }
  static int64_t left_stride(const PackedCodes& w) { return block_bytes(w); }
  static const char* left(const PackedCodes& w, int32_t pair, int32_t chunk, int32_t, char*) {
    const uint8_t* at = w.codes + 2 * pair * block_bytes(w) + int64_t{chunk} * kTileBytes;
    return reinterpret_cast<const char*>(at);
  }
  // Compilers want numbers of tiles to be written out.
  template <int SUMS>
  static void dot() {
    if constexpr (SUMS == 0) _tile_dpbusd(0, 4, 6);
    if constexpr (SUMS == 1) _tile_dpbusd(1, 4, 7);
    if constexpr (SUMS == 2) _tile_dpbusd(2, 5, 6);
    if constexpr (SUMS == 3) _tile_dpbusd(3, 5, 7);
  }

  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char* scratch) {
    const int32_t depth = call.weight.depth;
    int8_t* codes = reinterpret_cast<int8_t*>(scratch);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* scales = scales_of(call, static_cast<int32_t>(panel));
      int32_t* offsets = reinterpret_cast<int32_t*>(scales + 16);
      for (int64_t i = 0; i < 16; ++i) {
        int8_t* to = codes + i * depth;
        __builtin_memset(to, 0, static_cast<size_t>(depth));
        scales[i] = 1.0f;
        offsets[i] = 0;
        if (panel * 16 + i >= call.rows) continue;
        const T* x = static_cast<const T*>(call.x) + (panel * 16 + i) * call.in;
        scales[i] = scale_of(x, call.in, kLargest8);
        offsets[i] = 128 * round_codes_to(to, x, call.in, scales[i]);
      }
      pack_columns(reinterpret_cast<const uint32_t*>(codes), depth / 4, depth / 4,
                   panel_at(call, static_cast<int32_t>(panel)));
    }
  }

  template <class T>
  static void finish(const LinearCall& call, int32_t block, int32_t panel, const char* sums) {
    const float* scales = scales_of(call, panel);
    const vi offsets = load(reinterpret_cast<const int32_t*>(scales + 16));
    alignas(64) float scaled[16][16];
    for (int o = 0; o < 16; ++o) {
      const vi exact = subtract(load(reinterpret_cast<const int32_t*>(sums) + o * 16), offsets);
      store(scaled[o], to_float(exact) * load(scales));
    }
    store_columns<T>(call, block, panel, scaled[0], true);
  }
};

// Sixteen rows of 64 bytes as columns of words.
inline void turn_words(const uint8_t* codes, uint8_t* to) {
  vi fours[4][4];  // [rows 4q..][word % 4]: a word of four rows in each quarter
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const uint8_t* at = codes + 4 * q * kCodeBytes;
    const vi a = load_bytes(at), b = load_bytes(at + kCodeBytes);
    const vi c = load_bytes(at + 2 * kCodeBytes), d = load_bytes(at + 3 * kCodeBytes);
    const vi low[] = {_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)};
    const vi high[] = {_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)};
    fours[q][0] = even_pairs(low[0], low[1]);
    fours[q][1] = odd_pairs(low[0], low[1]);
    fours[q][2] = even_pairs(high[0], high[1]);
    fours[q][3] = odd_pairs(high[0], high[1]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const vi &a = fours[0][k], &b = fours[1][k], &c = fours[2][k], &d = fours[3][k];
    const vi low[] = {_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(c, d, 0x44)};
    const vi high[] = {_mm512_shuffle_i32x4(a, b, 0xee), _mm512_shuffle_i32x4(c, d, 0xee)};
    _mm512_storeu_si512(to + k * 64, _mm512_shuffle_i32x4(low[0], low[1], 0x88));
    _mm512_storeu_si512(to + (4 + k) * 64, _mm512_shuffle_i32x4(low[0], low[1], 0xdd));
    _mm512_storeu_si512(to + (8 + k) * 64, _mm512_shuffle_i32x4(high[0], high[1], 0x88));
    _mm512_storeu_si512(to + (12 + k) * 64, _mm512_shuffle_i32x4(high[0], high[1], 0xdd));
  }
}

template <CodeKind KIND>
struct AmxGroups : LinearAmx<AmxGroups<KIND>> {
  using Shared = LinearAmx<AmxGroups<KIND>>;
  static constexpr int32_t kSteps = Codes<KIND>::kChunk / 32;
  static constexpr int32_t kPassChunks = kPassBytes / (kSteps * kCodeBytes);

  static size_t buffer_bytes() { return 2 * kPassChunks * kSteps * kTileBytes; }
  static int64_t left_stride(const PackedCodes&) { return kPassChunks * kSteps * kTileBytes; }

  static const char* left(const PackedCodes& w, int32_t pair, int32_t chunk, int32_t count,
                          char* buffer) {
    const int32_t groups = Codes<KIND>::kChunk / w.group;
    const auto run = groups == 1 ? widen<1> : groups == 2 ? widen<2> : widen<4>;
    for (int32_t b = 0; b < 2; ++b) {
      run(w, 2 * pair + b, chunk, count, buffer + b * left_stride(w));
    }
    return buffer;
  }

  template <int GROUPS>
  static void widen(const PackedCodes& w, int32_t block, int32_t chunk, int32_t count, char* to) {
    const uint8_t* from = w.codes + block * block_bytes(w) + int64_t{chunk} * kTileBytes;
    alignas(64) float scales[GROUPS][16], least[GROUPS][16];
    alignas(64) uint8_t turned[kTileBytes];
    for (int32_t c = 0; c < count; ++c, from += kTileBytes, to += kSteps * kTileBytes) {
      turn_words(from, turned);
      for (int g = 0; g < GROUPS; ++g) {
        const Group group(w, block, (chunk + c) * GROUPS + g, 0);
        store(scales[g], group.scale);
        store(least[g], group.least);
      }
      for (int o = 0; o < 16; ++o) {
        const uint8_t* codes = turned + o * kCodeBytes;
        const auto widened = [&](vf values, int g) {
          const vf weights = fma(values, all(scales[g][o]), all(least[g][o]));
          return __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(weights));
        };
        if constexpr (KIND == kEight) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            char* at = to + i / 2 * kTileBytes + o * 64 + i % 2 * 32;
            const __m256i held = widened(load_codes(codes + 16 * i), i * GROUPS / 4);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), held);
          }
        } else {
          const vf values =
              KIND == kTable
                  ? load_codes(w.table)
                  : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
          const vi words = load_bytes(codes);
          const vi planes[] = {words, shift_words<4>(words), shift_words<8>(words),
                               shift_words<12>(words)};
          for (int g = 0; g < GROUPS; ++g) {
            // The weights of sixteen codes, twice.
            const vi weights = _mm512_broadcast_i64x4(widened(values, g));
#pragma GCC unroll 4
            for (int n = 4 / GROUPS * g; n < 4 / GROUPS * (g + 1); ++n) {
              char* tile = to + n * kTileBytes + o * 64;
              _mm512_storeu_si512(tile, _mm512_permutexvar_epi16(planes[n], weights));
            }
          }
        }
      }
    }
  }

  // Compilers want numbers of tiles to be written out.
  template <int SUMS>
  static void dot() {
    if constexpr (SUMS == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (SUMS == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (SUMS == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (SUMS == 3) _tile_dpbf16ps(3, 5, 7);
  }

  // Of bfloat16 rows, which stay as they are.
  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char* scratch) {
    const int64_t depth = call.weight.depth;
    bf16* values = reinterpret_cast<bf16*>(scratch);
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t row = panel * 16 + i, count = row < call.rows ? call.in : 0;
        bf16* to = values + i * depth;
        __builtin_memcpy(to, static_cast<const bf16*>(call.x) + row * call.in,
                         static_cast<size_t>(count) * sizeof(bf16));
        __builtin_memset(to + count, 0, static_cast<size_t>(depth - count) * sizeof(bf16));
      }
      pack_columns(reinterpret_cast<const uint32_t*>(values), depth / 2, depth / 2,
                   Shared::panel_at(call, static_cast<int32_t>(panel)));
    }
  }

  template <class T>
  static void finish(const LinearCall& call, int32_t block, int32_t panel, const char* sums) {
    store_columns<T>(call, block, panel, reinterpret_cast<const float*>(sums), false);
  }
};

// Of bfloat16 rows.
template <CodeKind KIND>
void take_tiles(Kernels& kernels) {
  kernels.groups[KIND].of[kBfloat16] = {path<LinearGroups<KIND, PairDots>>(1), path<AmxGroups<KIND>>(16), 2};
}

}  // namespace onestem::ONESTEM_ISA
