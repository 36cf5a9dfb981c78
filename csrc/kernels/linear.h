// Products with weights of 8 and 4 bits by multiply-adds of 16-bit pairs (8-bit weights: or of 8-bit
// fours, where there are such). Rows become integers: 8 bits a row with 8-bit weights, and 16 bits a
// group with those of 4, whose rounding is below bfloat16's.
#pragma once

namespace onestem::ONESTEM_ISA {

// Bytes by which codes are asked for before they are multiplied.
constexpr int64_t kAhead = 4096;

constexpr int kChunkVecs = kCodeBytes / int{sizeof(vi)};  // vectors in a chunk of an output

inline int64_t block_bytes(const PackedCodes& w) { return int64_t{w.chunks} * 16 * kCodeBytes; }

template <int BITS>
struct Codes {
  static constexpr int kPlanes = 16 / BITS;  // codes in a 16-bit word
  static constexpr int32_t kChunk = 32 * kPlanes;
  static constexpr int32_t kMask = (1 << BITS) - 1;
  static constexpr float kLargest = BITS == 8 ? 127.0f : 32767.0f;
};

// Codes PLANE of the words in `words`.
template <int BITS, int PLANE>
inline vi plane_of(vi words) {
  const vi low = PLANE == 0 ? words : shift_words<PLANE * BITS>(words);
  return PLANE == Codes<BITS>::kPlanes - 1 ? low : both(low, all(Codes<BITS>::kMask * 0x10001));
}

// Asks for codes that are multiplied some time later, in order of memory.
inline void ask_for(const uint8_t* codes) { __builtin_prefetch(codes + kAhead, 0, 2); }

// The nearest whole number, halves to even, of |x| <= 2^22.
inline vi nearest(vf x) { return truncate((x + all(12582912.0f)) - all(12582912.0f)); }

// The scale of values by their maximum; NaN where one of them is none, or infinite.
template <class T>
inline float scale_of(const T* x, int32_t count, float largest) {
  vf top = zeros(), odd = zeros();
  for_vectors(count, [&](int64_t d, int32_t n) {
    const vf value = get(x + d, n);
    top = max(top, magnitude(value));
    odd = fma(value, zeros(), odd);
  });
  const float most = top_of(top) + sum(odd);
  return most == 0 ? 1.0f : most / largest;
}

// Whole numbers x / scale, handed to `visit` with their place and number; gives their sum.
template <class T, class Visit>
inline int32_t round_codes(const T* x, int32_t count, float scale, Visit visit) {
  vi taken = all(0);
  for_vectors(count, [&](int64_t d, int32_t n) {
    const vi codes = nearest(get(x + d, n) / all(scale));
    taken = subtract(taken, codes);
    visit(d, codes, n);
  });
  return -sum(taken);
}

// The same, one after the other at `to`.
template <class T, class Code>
inline int32_t round_codes_to(Code* to, const T* x, int32_t count, float scale) {
  return round_codes(x, count, scale, [&](int64_t d, vi codes, int32_t n) {
    if (n == kLanes) return store_codes(to + d, codes);
    int32_t lanes[kLanes];
    store(lanes, codes);
    for (int32_t i = 0; i < n; ++i) to[d + i] = static_cast<Code>(lanes[i]);
  });
}

// A packed row: its codes, then a scale and what a zero of 1 takes off, for each group.
template <class Code>
struct PackedRow {
  Code* codes;
  float *scales, *offsets;

  PackedRow(char* at, const PackedCodes& w, int32_t groups)
      : codes(reinterpret_cast<Code*>(at)),
        scales(reinterpret_cast<float*>(at + int64_t{w.depth} * sizeof(Code))),
        offsets(scales + groups) {}
  static size_t bytes(const PackedCodes& w, int32_t groups) {
    const size_t used = w.depth * sizeof(Code) + 2 * sizeof(float) * groups;
    return (used + 63) / 64 * 64;
  }
};

// What is added up for an output and a row, without scales of the whole: y = sums * scale + bias.
template <class T>
inline void store_outputs(const LinearCall& call, int64_t row, int32_t out, vf value, bool scaled,
                          int32_t n) {
  const vf by = scaled ? get(call.weight.scales + out, n) : zeros();
  if (scaled) value = apart(value * by);
  if (call.bias != nullptr) value = value + get(call.bias + out, n);
  put(static_cast<T*>(call.y) + row * call.out + out, value, n);
}

template <class T>
inline void store_sixteen(const LinearCall& call, int64_t row, int32_t out, const float* values,
                          bool scaled) {
  for (int32_t i = 0; i < 16; i += kLanes) {
    const int32_t n = smaller(kLanes, call.out - out - i);
    if (n > 0) store_outputs<T>(call, row, out + i, load(values + i), scaled, n);
  }
}

// 8-bit weights: sums are whole numbers and exact, whatever the order.
struct WordDots8 {
  using Code = int16_t;
  static constexpr int kOuts = 4;
  // Inputs 64c + 2j + p stand at 64c + 32p + j, as the planes of words do.
  static int64_t place(int64_t i) { return (i & ~int64_t{63}) + (i & 1) * 32 + (i & 63) / 2; }
  template <class T>
  static int32_t round(Code* to, const T* x, int32_t count, float scale) {
    return round_codes(x, count, scale, [&](int64_t d, vi codes, int32_t n) {
      int32_t lanes[kLanes];
      store(lanes, codes);
      for (int32_t i = 0; i < n; ++i) to[place(d + i)] = static_cast<Code>(lanes[i]);
    });
  }
  static void clear(Code* codes, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) codes[place(at)] = 0;
  }
  static vi dot(const uint8_t* w, const Code* a, vi sums) {
    for (int h = 0; h < kChunkVecs; ++h) {
      const vi words = load_bytes(w + h * sizeof(vi));
      const char* at = reinterpret_cast<const char*>(a) + h * sizeof(vi);
      sums = multiply_pairs(plane_of<8, 0>(words), load_bytes(at), sums);
      sums = multiply_pairs(plane_of<8, 1>(words), load_bytes(at + 64), sums);
    }
    return sums;
  }
};

template <class Dots>
struct Linear8 {
  using Code = typename Dots::Code;
  using Row = PackedRow<Code>;

  static size_t panel_bytes(const PackedCodes& w) { return Row::bytes(w, 1); }
  static size_t scratch_bytes(const LinearCall&) { return 64; }
  static int32_t pairs(const LinearCall&) { return 1; }

  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char*) {
    for (int64_t i = begin; i < end; ++i) {
      const T* x = static_cast<const T*>(call.x) + i * call.in;
      const Row row(call.packed + i * panel_bytes(call.weight), call.weight, 1);
      row.scales[0] = scale_of(x, call.in, Codes<8>::kLargest);
      const int32_t total = Dots::round(row.codes, x, call.in, row.scales[0]);
      Dots::clear(row.codes, call.in, call.weight.depth);
      reinterpret_cast<int32_t&>(row.offsets[0]) = 128 * total;
    }
  }

  template <class T>
  static void multiply(const LinearCall& call, int32_t begin, int32_t end, char*) {
    for (int32_t block = 2 * begin; block < 2 * end; ++block) {
      int64_t row = 0;
      for (; row + 4 <= call.rows; row += 4) block_of<T, 4>(call, block, row);
      for (; row + 2 <= call.rows; row += 2) block_of<T, 2>(call, block, row);
      for (; row < call.rows; ++row) block_of<T, 1>(call, block, row);
    }
  }

 private:
  template <class T, int ROWS>
  static void block_of(const LinearCall& call, int32_t block, int64_t first) {
    constexpr int kOuts = ROWS == 1 ? 16 : Dots::kOuts;
    const PackedCodes& w = call.weight;
    const size_t bytes = panel_bytes(w);
    const char* rows = call.packed + first * bytes;
    int32_t sums[ROWS][16];
    for (int32_t o = 0; o < 16; o += kOuts) {
      vi acc[ROWS][kOuts];
      for (auto& of_row : acc) {
        for (vi& one : of_row) one = all(0);
      }
      const uint8_t* codes = w.codes + block * block_bytes(w) + o * kCodeBytes;
      const Code* a = reinterpret_cast<const Code*>(rows);
      for (int32_t c = 0; c < w.chunks; ++c, codes += 16 * kCodeBytes, a += 64) {
#pragma GCC unroll 16
        for (int k = 0; k < kOuts; ++k) {
          if (o == 0) ask_for(codes + k * kCodeBytes);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            const char* at = reinterpret_cast<const char*>(a) + r * bytes;
            acc[r][k] = Dots::dot(codes + k * kCodeBytes, reinterpret_cast<const Code*>(at),
                                  acc[r][k]);
          }
        }
      }
      for (int r = 0; r < ROWS; ++r) {
        for (int k = 0; k < kOuts; ++k) sums[r][o + k] = sum(acc[r][k]);
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      const Row row(const_cast<char*>(rows) + r * bytes, w, 1);
      const vi offset = all(reinterpret_cast<const int32_t&>(row.offsets[0]));
      float values[16];
      for (int i = 0; i < 16; i += kLanes) {
        store(values + i, to_float(subtract(load(sums[r] + i), offset)) * all(row.scales[0]));
      }
      store_sixteen<T>(call, first + r, block * 16, values, true);
    }
  }
};

// 4-bit weights. A row's codes of a group have 16 bits, so products of a group are exact too.
struct Linear4 {
  using Row = PackedRow<int16_t>;

  static size_t panel_bytes(const PackedCodes& w) { return Row::bytes(w, w.groups); }
  static size_t scratch_bytes(const LinearCall&) { return 64; }
  static int32_t pairs(const LinearCall&) { return 1; }

  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char*) {
    const PackedCodes& w = call.weight;
    for (int64_t i = begin; i < end; ++i) {
      const T* x = static_cast<const T*>(call.x) + i * call.in;
      const Row row(call.packed + i * panel_bytes(w), w, w.groups);
      for (int32_t g = 0; g < w.groups; ++g) {
        const int32_t from = g * w.group, count = clamp(call.in - from, 0, w.group);
        int16_t* codes = row.codes + from;
        row.scales[g] = scale_of(x + from, count, Codes<4>::kLargest);
        const int32_t total = round_codes_to(codes, x + from, count, row.scales[g]);
        for (int32_t at = count; at < w.group; ++at) codes[at] = 0;
        row.offsets[g] = row.scales[g] * static_cast<float>(total);
      }
    }
  }

  template <class T>
  static void multiply(const LinearCall& call, int32_t begin, int32_t end, char*) {
    const int32_t group = call.weight.group;
    const auto run = group == 128 ? blocks<T, 1> : group == 64 ? blocks<T, 2> : blocks<T, 4>;
    run(call, begin, end);
  }

 private:
  template <class T, int GROUPS>
  static void blocks(const LinearCall& call, int32_t begin, int32_t end) {
    for (int32_t block = 2 * begin; block < 2 * end; ++block) {
      int64_t row = 0;
      for (; row + 4 <= call.rows; row += 4) block_of<T, GROUPS, 4>(call, block, row);
      for (; row + 2 <= call.rows; row += 2) block_of<T, GROUPS, 2>(call, block, row);
      for (; row < call.rows; ++row) block_of<T, GROUPS, 1>(call, block, row);
    }
  }

  // GROUPS: of a chunk.
  template <class T, int GROUPS, int ROWS>
  static void block_of(const LinearCall& call, int32_t block, int64_t first) {
    constexpr int kOuts = ROWS == 1 ? 16 : kTileRows / (ROWS / 2);
    const PackedCodes& w = call.weight;
    const size_t bytes = panel_bytes(w);
    const char* rows = call.packed + first * bytes;
    const float* scales = w.scales + int64_t{block} * w.groups * 16;
    const uint8_t* zeros_at =
        w.zeros == nullptr ? nullptr : w.zeros + int64_t{block} * w.groups * 16;
    alignas(64) float values[ROWS][16], factors[ROWS][GROUPS][16];
    float taken[ROWS][16] = {};
    for (int32_t o = 0; o < 16; o += kOuts) {
      vf acc[ROWS][kOuts];
      for (auto& of_row : acc) {
        for (vf& one : of_row) one = zeros();
      }
      const uint8_t* codes = w.codes + block * block_bytes(w) + o * kCodeBytes;
      for (int32_t c = 0; c < w.chunks; ++c, codes += 16 * kCodeBytes) {
        for (int r = 0; r < ROWS; ++r) {
          const Row row(const_cast<char*>(rows) + r * bytes, w, w.groups);
          for (int g = 0; g < GROUPS; ++g) {
            const int32_t at = c * GROUPS + g;
            for (int i = 0; i < 16; i += kLanes) {
              const vf scale = load(scales + at * 16 + i);
              store(factors[r][g] + i, scale * all(row.scales[at]));
              if (o != 0) continue;
              const vf zero = zeros_at == nullptr ? all(8.0f) : load_codes(zeros_at + at * 16 + i);
              store(taken[r] + i, fma(scale * zero, all(row.offsets[at]), load(taken[r] + i)));
            }
          }
        }
        const char* a = rows + int64_t{c} * 256;
#pragma GCC unroll 16
        for (int k = 0; k < kOuts; ++k) {
          if (o == 0) ask_for(codes + k * kCodeBytes);
          add_chunk<GROUPS, ROWS>(codes + k * kCodeBytes, a, bytes, factors, o + k, acc, k);
        }
      }
      for (int r = 0; r < ROWS; ++r) {
        for (int k = 0; k < kOuts; ++k) values[r][o + k] = sum(acc[r][k]);
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      for (int i = 0; i < 16; i += kLanes) {
        store(values[r] + i, load(values[r] + i) - load(taken[r] + i));
      }
      store_sixteen<T>(call, first + r, block * 16, values[r], false);
    }
  }

  template <int GROUPS, int ROWS, int OUTS>
  __attribute__((always_inline)) static void add_chunk(const uint8_t* codes, const char* a,
                                                       size_t bytes,
                                                       const float (&factors)[ROWS][GROUPS][16],
                                                       int out, vf (&acc)[ROWS][OUTS], int k) {
    vi planes[kChunkVecs][4];
    for (int h = 0; h < kChunkVecs; ++h) {
      const vi words = load_bytes(codes + h * sizeof(vi));
      planes[h][0] = plane_of<4, 0>(words);
      planes[h][1] = plane_of<4, 1>(words);
      planes[h][2] = plane_of<4, 2>(words);
      planes[h][3] = plane_of<4, 3>(words);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) {
        vi sums = all(0);
#pragma GCC unroll 4
        for (int n = 4 / GROUPS * g; n < 4 / GROUPS * (g + 1); ++n) {
          for (int h = 0; h < kChunkVecs; ++h) {
            sums = multiply_pairs(planes[h][n], load_bytes(a + r * bytes + 64 * n + h * sizeof(vi)),
                                  sums);
          }
        }
        acc[r][k] = fma(to_float(sums), all(factors[r][g][out]), acc[r][k]);
      }
    }
  }
};

template <class Way>
constexpr LinearPath path(int32_t panel) {
  return {panel,
          Way::panel_bytes,
          Way::scratch_bytes,
          Way::pairs,
          {Way::template pack<float>, Way::template pack<bf16>, Way::template pack<f16>},
          {Way::template multiply<float>, Way::template multiply<bf16>,
           Way::template multiply<f16>}};
}

// Of one way for all numbers of rows.
template <class Way>
constexpr LinearWays one_way() {
  return {path<Way>(1), path<Way>(1), INT32_MAX};
}

template <class Way>
constexpr LinearKernels any_type() {
  return {{one_way<Way>(), one_way<Way>(), one_way<Way>()}};
}

}  // namespace onestem::ONESTEM_ISA
