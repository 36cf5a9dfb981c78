// Products with weights of 8 and 4 bits by dot products of four bytes (AVX-512 VNNI).
#pragma once

namespace onestem::ONESTEM_ISA {

struct ByteDots {
  using Code = int8_t;
  static constexpr int kOuts = 4;
  template <class T>
  static int32_t round(Code* to, const T* x, int32_t count, float scale) {
    return round_codes_to(to, x, count, scale);
  }
  static void clear(Code* codes, int64_t begin, int64_t end) {
    __builtin_memset(codes + begin, 0, static_cast<size_t>(end - begin));
  }
  static vi dot(const uint8_t* w, const Code* a, vi sums) {
    return _mm512_dpbusd_epi32(sums, load_bytes(w), load_bytes(a));
  }
};

// Products of fours of bytes: whole numbers of rows have 8 bits.
struct FourDots {
  static constexpr bool kBytes = true;
  static constexpr float kLargest = kLargest8;
  static vi dot(vi weights, vi rows, vi sums) {
    return apart(_mm512_dpbusd_epi32(sums, weights, rows));
  }
};

// Groups, and many rows of 8 bits a group: sums of a group are whole numbers below 2^24, so exact in
// float32 too. Codes of a pair of blocks become bytes first: a vector holds four inputs of sixteen
// outputs, and meets a row's four. Numbers of groups become float32 with them.
struct ManyBytes {
  static constexpr int kRows = 12;  // of a panel
  static constexpr int kTile = 6;   // of a tile: dots and sums of 32 outputs are 24 of the 32 registers
  static constexpr int32_t kStep = 2 * sizeof(vi);  // bytes of four inputs of a pair
  static constexpr int64_t kTurnedFit = 512 << 10;  // a share of the second-level cache

  // Of a pair's group: scales of both blocks, then what values of 0 are worth.
  using Numbers = float[2][2][16];

  static size_t panel_bytes(const PackedCodes& w) {
    return kRows * (size_t{1} * w.depth + 2 * sizeof(float) * w.groups);
  }
  static int64_t code_bytes(const PackedCodes& w) { return int64_t{w.depth} / 4 * kStep; }
  static int64_t turned_bytes(const PackedCodes& w) {
    return code_bytes(w) + int64_t{w.groups} * sizeof(Numbers);
  }
  static int32_t pairs(const LinearCall& call) {
    if (call.rows <= kRows) return 1;
    return clamp(static_cast<int32_t>(kTurnedFit / turned_bytes(call.weight)), 1, 8);
  }
  static size_t scratch_bytes(const LinearCall& call) {
    return static_cast<size_t>(turned_bytes(call.weight)) * pairs(call);
  }

  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char* scratch) {
    const PackedCodes& w = call.weight;
    int8_t* codes = reinterpret_cast<int8_t*>(scratch);
    for (int64_t p = begin; p < end; ++p) {
      const Panel panel(call, p);
      for (int32_t r = 0; r < panel.rows; ++r) {
        const T* x = static_cast<const T*>(call.x) + (p * kRows + r) * call.in;
        int8_t* of = codes + r * w.depth;
        round(w, x, call.in, of, panel.scales + r, panel.offsets + r, panel.rows);
        if (w.kind != kEight) swap_middles(of, w.depth);
      }
      int8_t* to = panel.codes;
      for (int32_t d = 0; d < w.depth; d += 4) {
        for (int32_t r = 0; r < panel.rows; ++r, to += 4) {
          __builtin_memcpy(to, codes + r * w.depth + d, 4);
        }
      }
    }
  }

  template <class T>
  static void multiply(const LinearCall& call, int32_t begin, int32_t end, char* scratch) {
    const PackedCodes& w = call.weight;
    const int64_t bytes = turned_bytes(w);
    // Codes for one panel are turned as they are multiplied, while memory brings the next ones.
    const int32_t step = call.rows <= kRows ? 1 : w.chunks;
    const auto turn = w.kind == kFour    ? turned<kFour>
                      : w.kind == kTable ? turned<kTable>
                                         : turned<kEight>;
    float sums[kRows][32];
    for (int32_t c = 0; c < w.chunks; c += step) {
      for (int32_t pair = begin; pair < end; ++pair) {
        char* to = scratch + (pair - begin) * bytes;
        for (int32_t b = 0; b < 2; ++b) {
          turn(w, 2 * pair + b, c, step, to + b * sizeof(vi));
          turn_numbers(w, 2 * pair + b, c, step, numbers_at(w, to), b);
        }
      }
      for (int64_t p = 0; p * kRows < call.rows; ++p) {
        const Panel panel(call, p);
        for (int32_t pair = begin; pair < end; ++pair) {
          if (c == 0) __builtin_memset(sums, 0, sizeof sums);
          multiply_panel(w, panel, c, step, scratch + (pair - begin) * bytes, sums);
          if (c + step < w.chunks) continue;
          for (int32_t r = 0; r < panel.rows; ++r) {
            for (int32_t b = 0; b < 2; ++b) {
              const int32_t out = (2 * pair + b) * 16;
              store_sixteen<T>(call, p * kRows + r, out, sums[r] + b * 16, false);
            }
          }
        }
      }
    }
  }

 private:
  // Whole numbers of a row, one after the other; of group g the scale and the offset at g * stride.
  template <class T>
  static void round(const PackedCodes& w, const T* x, int32_t in, int8_t* codes, float* scales,
                    float* offsets, int32_t stride) {
    for (int32_t g = 0; g < w.groups; ++g) {
      const int32_t from = g * w.group, count = clamp(in - from, 0, w.group);
      const float scale = scale_of(x + from, count, kLargest8);
      scales[g * stride] = scale;
      const int32_t total = round_codes_to(codes + from, x + from, count, scale);
      offsets[g * stride] = offset_of(w, scale, total);
      for (int32_t at = count; at < w.group; ++at) codes[from + at] = 0;
    }
  }

  // Of four neighbours the first, the third, the second, the fourth, as `turned` has nibbles.
  static void swap_middles(int8_t* codes, int32_t depth) {
    for (int32_t d = 0; d < depth; d += 64) {
      const vi fours = load_bytes(codes + d);
      const vi second = _mm512_slli_epi32(both(fours, all(0xff00)), 8);
      const vi third = both(_mm512_srli_epi32(fours, 8), all(0xff00));
      const vi ends = both(fours, all(-0xffff01));
      _mm512_storeu_si512(codes + d, ends | second | third);
    }
  }

  // Packed rows, side by side: four inputs of each, then the next four; groups' scales and offsets.
  struct Panel {
    int32_t rows;
    int8_t* codes;
    float *scales, *offsets;

    Panel(const LinearCall& call, int64_t panel)
        : rows(static_cast<int32_t>(
              call.rows - panel * kRows < kRows ? call.rows - panel * kRows : kRows)),
          codes(reinterpret_cast<int8_t*>(call.packed) + panel * panel_bytes(call.weight)),
          scales(reinterpret_cast<float*>(codes + int64_t{rows} * call.weight.depth)),
          offsets(scales + int64_t{rows} * call.weight.groups) {}
  };

  // Four codes of sixteen outputs: low nibbles of words of `even`, and of the bytes above of `odd`.
  template <CodeKind KIND>
  static void store_fours(const PackedCodes& w, char* to, vi even, vi odd) {
    const vi fours = both(even, all(0x000f000f)) | both(odd, all(0x0f000f00));
    _mm512_storeu_si512(to, KIND == kTable ? looked_up(w.table, fours) : fours);
  }

  // The codes of `count` chunks of a block as bytes, at [inputs / 4][2 blocks][16][4 inputs].
  template <CodeKind KIND>
  static void turned(const PackedCodes& w, int32_t block, int32_t chunk, int32_t count, char* to) {
    const uint8_t* codes =
        w.codes + block * block_bytes(w) + int64_t{chunk} * 16 * kCodeBytes;
    constexpr int32_t kSteps = Codes<KIND>::kChunk / 4;
    for (int32_t c = 0; c < count; ++c, codes += 16 * kCodeBytes, to += kSteps * kStep) {
      for (int i = 0; i < 16; ++i) ask_for(codes + i * kCodeBytes);
      if constexpr (KIND == kEight) {
#pragma GCC unroll 16
        for (int d = 0; d < 16; ++d) {
          _mm512_storeu_si512(to + d * kStep, load_bytes(codes + d * kCodeBytes));
        }
      } else {
#pragma GCC unroll 8
        for (int d = 0; d < 8; ++d) {
          const vi even = load_bytes(codes + 2 * d * kCodeBytes);
          const vi odd = load_bytes(codes + (2 * d + 1) * kCodeBytes);
          char* at = to + d * kStep;
          store_fours<KIND>(w, at, even, _mm512_slli_epi32(odd, 8));
          store_fours<KIND>(w, at + 8 * kStep, shift_words<4>(even), _mm512_slli_epi32(odd, 4));
          store_fours<KIND>(w, at + 16 * kStep, shift_words<8>(even), odd);
          store_fours<KIND>(w, at + 24 * kStep, shift_words<12>(even), shift_words<4>(odd));
        }
      }
    }
  }

  static Numbers* numbers_at(const PackedCodes& w, char* turned) {
    return reinterpret_cast<Numbers*>(turned + code_bytes(w));
  }

  // The numbers of the groups of `count` chunks of block `b` of a pair.
  static void turn_numbers(const PackedCodes& w, int32_t block, int32_t chunk, int32_t count,
                           Numbers* to, int32_t b) {
    const int32_t groups = w.groups / w.chunks, first = chunk * groups;
    for (int32_t g = 0; g < count * groups; ++g) {
      const Group group(w, block, first + g, 0);
      store(to[g][0][b], group.scale);
      if (has_least(w)) store(to[g][1][b], group.least);
    }
  }

  // Adds what `count` chunks give, by tiles of rows that are as large as each other.
  static void multiply_panel(const PackedCodes& w, const Panel& panel, int32_t chunk, int32_t count,
                             char* turned, float (*sums)[32]) {
    const int32_t groups = w.groups / w.chunks;
    Tile tile{turned, numbers_at(w, turned), count * groups, w.group / 4, panel.rows};
    const int32_t tiles = (panel.rows + kTile - 1) / kTile;
    for (int32_t i = 0, row = 0; i < tiles; ++i) {
      const int32_t end = panel.rows * (i + 1) / tiles;
      tile.rows = panel.codes + int64_t{chunk} * (w.depth / w.chunks) * panel.rows + 4 * row;
      tile.scales = panel.scales + int64_t{chunk} * groups * panel.rows + row;
      tile.offsets = panel.offsets + int64_t{chunk} * groups * panel.rows + row;
      if (has_least(w)) {
        multiply_rows<true, kTile>(tile, end - row, sums + row);
      } else {
        multiply_rows<false, kTile>(tile, end - row, sums + row);
      }
      row = end;
    }
  }

  // Some groups of a pair, and of a tile's first row; a row's next four, scale and offset are
  // `stride` rows further.
  struct Tile {
    const char* codes;
    const Numbers* numbers;
    int32_t groups, steps, stride;
    const int8_t* rows = nullptr;
    const float *scales = nullptr, *offsets = nullptr;
  };

  template <bool LEAST, int ROWS>
  static void multiply_rows(const Tile& tile, int32_t rows, float (*sums)[32]) {
    if constexpr (ROWS > 1) {
      if (rows < ROWS) return multiply_rows<LEAST, ROWS - 1>(tile, rows, sums);
    }
    multiply_tile<LEAST, ROWS>(tile, sums);
  }

  // A function of its own, so that the compiler keeps dots and sums in registers.
  template <bool LEAST, int ROWS>
  __attribute__((noinline)) static void multiply_tile(const Tile& tile, float (*sums)[32]) {
    const char* codes = tile.codes;
    const int8_t* rows = tile.rows;
    const float *scales = tile.scales, *offsets = tile.offsets;
    vf acc[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      acc[r][0] = load(sums[r]);
      acc[r][1] = load(sums[r] + 16);
    }
    for (int32_t g = 0; g < tile.groups; ++g, scales += tile.stride, offsets += tile.stride) {
      vi dots[ROWS][2];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        dots[r][0] = dots[r][1] = all(LEAST ? 0 : __builtin_bit_cast(int32_t, offsets[r]));
      }
      const char* end = codes + tile.steps * kStep;
      do {
        const vi first = load_bytes(codes), second = load_bytes(codes + sizeof(vi));
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          int32_t four;
          __builtin_memcpy(&four, rows + 4 * r, 4);
          dots[r][0] = apart(_mm512_dpbusd_epi32(dots[r][0], first, all(four)));
          dots[r][1] = apart(_mm512_dpbusd_epi32(dots[r][1], second, all(four)));
        }
        codes += kStep, rows += 4 * tile.stride;
      } while (codes != end);
#pragma GCC unroll 2
      for (int b = 0; b < 2; ++b) {
        const Group group(load(tile.numbers[g][0][b]), load(tile.numbers[g][1][b]));
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          acc[r][b] = add_group<LEAST>(group, to_float(dots[r][b]), scales[r], offsets[r], acc[r][b]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      store(sums[r], acc[r][0]);
      store(sums[r] + 16, acc[r][1]);
    }
  }
};

template <CodeKind KIND>
void take_bytes(Kernels& kernels) {
  using Few = LinearGroups<KIND, FourDots>;
  constexpr LinearWays bytes = {path<Few>(1), path<ManyBytes>(ManyBytes::kRows), Few::kMost};
  kernels.groups[KIND] = {{one_way<LinearGroups<KIND, PairDots>>(), bytes, bytes}};
}

// Rows of 16 bits are multiplied as bytes; those of 32 would lose half of their bits.
inline void take_bytes(Kernels& kernels) {
  take_bytes<kFour>(kernels);
  take_bytes<kTable>(kernels);
  take_bytes<kEight>(kernels);
}

}  // namespace onestem::ONESTEM_ISA
