// Products with weights of 8 and 4 bits by multiply-adds of 16-bit pairs (channels: or of 8-bit fours,
// where there are such). Rows become integers: 8 bits a row for channels, and 16 bits a group for
// groups, whose rounding is below bfloat16's.
#pragma once

namespace onestem::ONESTEM_ISA {

// Bytes by which codes are asked for before they are multiplied.
constexpr int64_t kAhead = 4096, kNumbersAhead = 256;

// Bytes from which two halves of a piece are read side by side.
constexpr int64_t kStream = 256 << 10;

constexpr int kChunkVecs = kCodeBytes / int{sizeof(vi)};  // vectors in a chunk of an output

inline int64_t block_bytes(const PackedCodes& w) { return int64_t{w.chunks} * 16 * kCodeBytes; }

constexpr float kLargest8 = 127.0f, kLargest16 = 32767.0f;

template <CodeKind KIND>
struct Codes {
  static constexpr int kBits = KIND == kEight ? 8 : 4;
  static constexpr int kPlanes = 16 / kBits;  // codes in a 16-bit word
  static constexpr int32_t kChunk = 32 * kPlanes;
  static constexpr int32_t kMask = ((1 << kBits) - 1) * 0x10001;
};

// What codes PLANE of the words in `words` stand for.
template <CodeKind KIND, int PLANE>
inline vi plane_of(const PackedCodes& w, vi words) {
  vi plane = PLANE == 0 ? words : shift_words<PLANE * Codes<KIND>::kBits>(words);
  if (PLANE < Codes<KIND>::kPlanes - 1) plane = both(plane, all(Codes<KIND>::kMask));
  return KIND == kTable ? both(looked_up(w.table, plane), all(0x00ff00ff)) : plane;
}

// What the bytes of words stand for: of 4 bits their low or high nibbles.
template <CodeKind KIND, int HIGH>
inline vi bytes_of(const PackedCodes& w, vi words) {
  if (KIND == kEight) return words;
  const vi bytes = both(HIGH ? shift_words<4>(words) : words, all(0x0f0f0f0f));
  return KIND == kTable ? looked_up(w.table, bytes) : bytes;
}

// Numbers of outputs `i` to `i + kLanes` of a block, of a group. Always inlined: a call would write all
// registers of sums to memory.
__attribute__((always_inline)) inline vf numbers_of(const GroupNumbers& of, const PackedCodes& w,
                                                    int32_t block, int32_t g, int i) {
  const int64_t at = (int64_t{block} * w.groups + g) * 16 + i;
  if (of.supers != nullptr) {
    const int64_t super = int64_t{block} * (w.groups >> of.shift) + (g >> of.shift);
    const vf factor = load(static_cast<const f16*>(of.supers) + super * 16 + i);
    return load_codes(static_cast<const int8_t*>(of.values) + at) * factor;
  }
  if (of.kind == kFloat16) return load(static_cast<const f16*>(of.values) + at);
  if (of.kind == kBfloat16) return load(static_cast<const bf16*>(of.values) + at);
  return load(static_cast<const float*>(of.values) + at);
}

// The scales of a group, and what values of 0 are worth: the minimum, or minus zero times scale.
struct Group {
  vf scale, least;
  Group(vf scale, vf least) : scale(scale), least(least) {}
  __attribute__((always_inline)) Group(const PackedCodes& w, int32_t block, int32_t g, int i)
      : scale(numbers_of(w.scales, w, block, g, i)) {
    if (w.minimums.values != nullptr) {
      least = numbers_of(w.minimums, w, block, g, i);
    } else if (w.zeros == nullptr) {
      least = scale * all(static_cast<float>(-w.zero));
    } else {
      least = zeros() - scale * load_codes(w.zeros + (int64_t{block} * w.groups + g) * 16 + i);
    }
  }
};

// Asks for codes that are multiplied some time later, in order of memory.
template <int64_t AHEAD = kAhead>
__attribute__((always_inline)) inline void ask_for(const uint8_t* codes) {
  __builtin_prefetch(codes + AHEAD, 0, 2);
}

// The same of numbers of group g of a block.
__attribute__((always_inline)) inline void ask_for(const GroupNumbers& of, const PackedCodes& w,
                                                   int32_t block, int32_t g) {
  const int size = of.supers != nullptr ? 1 : of.kind == kFloat32 ? 4 : 2;
  const int64_t at = (int64_t{block} * w.groups + g) * 16 * size;
  __builtin_prefetch(static_cast<const char*>(of.values) + at + kNumbersAhead, 0, 2);
}

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

// A packed row: its codes, then a scale and what its codes add up to, for each group.
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
  const float* scales = static_cast<const float*>(call.weight.scales.values);
  const vf by = scaled ? get(scales + out, n) : zeros();
  if (scaled) value = apart(value * by);
  if (call.bias != nullptr) value = value + get(call.bias + out, n);
  put(static_cast<T*>(call.y) + row * call.y_stride + out, value, n);
}

template <class T>
inline void store_sixteen(const LinearCall& call, int64_t row, int32_t out, const float* values,
                          bool scaled) {
  for (int32_t i = 0; i < 16; i += kLanes) {
    const int32_t n = smaller(kLanes, call.out - out - i);
    if (n > 0) store_outputs<T>(call, row, out + i, load(values + i), scaled, n);
  }
}

// Of 8-bit words: inputs 64c + 2j + p stand at 64c + 32p + j, as the planes of words do.
inline int64_t word_place(int64_t i) { return (i & ~int64_t{63}) + (i & 1) * 32 + (i & 63) / 2; }

// Whole numbers of a row from its input `from` on, at those places.
template <class T>
inline int32_t round_words(int16_t* to, int64_t from, const T* x, int32_t count, float scale) {
  return round_codes(x + from, count, scale, [&](int64_t d, vi codes, int32_t n) {
    int32_t lanes[kLanes];
    store(lanes, codes);
    for (int32_t i = 0; i < n; ++i) to[word_place(from + d + i)] = static_cast<int16_t>(lanes[i]);
  });
}

// Channels: sums are whole numbers and exact, whatever the order.
struct WordDots {
  using Code = int16_t;
  static constexpr int kOuts = 4;
  template <class T>
  static int32_t round(Code* to, const T* x, int32_t count, float scale) {
    return round_words(to, 0, x, count, scale);
  }
  static void clear(Code* codes, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) codes[word_place(at)] = 0;
  }
  static vi dot(const uint8_t* w, const Code* a, vi sums) {
    for (int h = 0; h < kChunkVecs; ++h) {
      const vi words = load_bytes(w + h * sizeof(vi));
      const char* at = reinterpret_cast<const char*>(a) + h * sizeof(vi);
      sums = multiply_pairs(both(words, all(0x00ff00ff)), load_bytes(at), sums);
      sums = multiply_pairs(shift_words<8>(words), load_bytes(at + 64), sums);
    }
    return sums;
  }
};

template <class Dots>
struct LinearChannels {
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
      row.scales[0] = scale_of(x, call.in, kLargest8);
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

// Whether values of 0 of each group are worth a number of their own. Otherwise all have one zero, and
// what it takes off dots is a whole number.
inline bool has_least(const PackedCodes& w) {
  return w.minimums.values != nullptr || w.zeros != nullptr;
}

// Of a row's codes in a group, which add up to `total`: that times their scale where groups have
// `least`, or else what is added to dots.
inline float offset_of(const PackedCodes& w, float scale, int32_t total) {
  if (has_least(w)) return scale * static_cast<float>(total);
  return __builtin_bit_cast(float, -w.zero * total);
}

// Adds dots of a group. A row has the same bits in all ways that round it alike.
template <bool LEAST>
inline vf add_group(const Group& group, vf dots, float row_scale, float offset, vf sums) {
  if constexpr (LEAST) sums = fma(group.least, all(offset), sums);
  return fma(dots * all(row_scale), group.scale, sums);
}

// Products of pairs of 16 bits: whole numbers of rows have as many.
struct PairDots {
  static constexpr bool kBytes = false;
  static constexpr float kLargest = kLargest16;
  // Apart: GCC would keep all products of a group, and add them up at its end.
  static vi dot(vi weights, vi rows, vi sums) {
    return apart(multiply_pairs(weights, rows, sums));
  }
};

// Groups. A row's whole numbers of a group are rounded by its maximum, so that sums of a group's products
// fit 32 bits. A word of a row meets one of each output: of 8 bits four inputs or, of pairs, two planes
// of two; of 4 bits four planes of two inputs, as 16 bits each or as bytes between zeros. If a chunk is
// one group, bytes of two planes share a word.
template <CodeKind KIND, class Dots>
struct LinearGroups {
  using Code = std::conditional_t<Dots::kBytes && KIND == kEight, int8_t, int16_t>;
  using Row = PackedRow<Code>;
  static constexpr int kMost = 4;
  static constexpr int32_t kChunk = Codes<KIND>::kChunk;

  static size_t panel_bytes(const PackedCodes& w) { return Row::bytes(w, w.groups); }
  static size_t scratch_bytes(const LinearCall& call) {
    return static_cast<size_t>(call.weight.depth) * sizeof(Code);
  }
  static int32_t pairs(const LinearCall&) { return 1 << 24; }  // as many as there are

  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char* scratch) {
    const PackedCodes& w = call.weight;
    Code* codes = reinterpret_cast<Code*>(scratch);
    for (int64_t i = begin; i < end; ++i) {
      const T* x = static_cast<const T*>(call.x) + i * call.in;
      const Row row(call.packed + i * panel_bytes(w), w, w.groups);
      if (call.in < w.depth) __builtin_memset(codes, 0, w.depth * sizeof(Code));
      for (int32_t g = 0; g < w.groups; ++g) {
        const int32_t from = g * w.group, count = clamp(call.in - from, 0, w.group);
        const float scale = row.scales[g] = scale_of(x + from, count, Dots::kLargest);
        row.offsets[g] = offset_of(w, scale, round_codes_to(codes + from, x + from, count, scale));
      }
      for (int32_t c = 0; c < w.depth; c += kChunk) place(w, codes + c, row.codes + c);
    }
  }

  template <class T>
  static void multiply(const LinearCall& call, int32_t begin, int32_t end, char*) {
    const int32_t groups = kChunk / call.weight.group, half = end - begin;
    const bool streams = call.rows == 1 && half * block_bytes(call.weight) >= kStream;
    const auto run = groups == 1   ? (streams ? blocks_of<1, 1, 2> : blocks_of<1, kMost, 1>)
                     : groups == 2 ? (streams ? blocks_of<2, 1, 2> : blocks_of<2, kMost, 1>)
                                   : (streams ? blocks_of<4, 1, 2> : blocks_of<4, kMost, 1>);
    const int32_t at_once = streams ? 2 : 1;
    for (int32_t block = 2 * begin; block < 2 * end - half * (at_once - 1); ++block) {
      const int32_t blocks[2] = {block, block + half};
      for (int64_t row = 0; row < call.rows;) {
        alignas(64) float values[2][kMost][16];
        const int32_t count = run(call, blocks, row, values);
        for (int32_t r = 0; r < count; ++r, ++row) {
          for (int b = 0; b < at_once; ++b) store_sixteen<T>(call, row, blocks[b] * 16, values[b][r], false);
        }
      }
    }
  }

 private:
  // A chunk of a row, from one input after the other.
  static void place(const PackedCodes& w, const Code* from, Code* to) {
    if (KIND == kEight && !Dots::kBytes) {
      for (int j = 0; j < 32; ++j) {
        to[j] = from[2 * j];
        to[32 + j] = from[2 * j + 1];
      }
    } else if (KIND == kEight || !Dots::kBytes) {
      __builtin_memcpy(to, from, kChunk * sizeof(Code));
    } else {
      for (int j = 0; j < 64; ++j) {
        const int low = from[j] & 0xff, high = from[64 + j] * 256;
        to[j] = static_cast<Code>(w.group == kChunk ? low | high : low);
        to[64 + j] = static_cast<Code>(high);
      }
    }
  }

  // Multiplies up to ROWS rows, and says how many. GROUPS: of a chunk; AT_ONCE: the blocks, one or two,
  // which are read side by side: that takes up to a quarter less time where both go on for long.
  template <int GROUPS, int ROWS, int AT_ONCE>
  static int32_t blocks_of(const LinearCall& call, const int32_t (&blocks)[2], int64_t first,
                           float (*values)[kMost][16]) {
    if constexpr (ROWS > 1) {
      if (call.rows - first < ROWS) {
        return blocks_of<GROUPS, ROWS - 1, AT_ONCE>(call, blocks, first, values);
      }
    }
    const PackedCodes& w = call.weight;
    const char* rows = call.packed + first * panel_bytes(w);
    for (int i = 0; i < 16; i += kLanes) {
      vf acc[AT_ONCE][ROWS];
      for (auto& of_block : acc) {
        for (vf& one : of_block) one = zeros();
      }
      for (int32_t c = 0; c < w.chunks; ++c) {
#pragma GCC unroll 2
        for (int b = 0; b < AT_ONCE; ++b) {
          add_chunk<GROUPS, ROWS, kAhead / AT_ONCE>(w, blocks[b], c, i, rows, acc[b]);
        }
      }
      for (int b = 0; b < AT_ONCE; ++b) {
        for (int r = 0; r < ROWS; ++r) store(values[b][r] + i, acc[b][r]);
      }
    }
    return ROWS;
  }

  // Adds what chunk c of a block gives. AHEAD: as `kAhead`.
  template <int GROUPS, int ROWS, int64_t AHEAD>
  __attribute__((always_inline)) static void add_chunk(const PackedCodes& w, int32_t block, int32_t c,
                                                       int i, const char* rows, vf (&acc)[ROWS]) {
    // Groups at a time: all planes are taken from words once. More rows leave no registers for that.
    constexpr int kEach = Dots::kBytes || ROWS == 1 ? GROUPS : 1;
    constexpr int kChains = ROWS * kEach < 4 ? 4 / (ROWS * kEach) : 1;  // do not wait for each other
    const size_t bytes = panel_bytes(w);
    const uint8_t* codes = w.codes + block * block_bytes(w) + int64_t{c} * 16 * kCodeBytes;
    const char* at = rows + int64_t{c} * kChunk * sizeof(Code);
    if (ROWS == 1 && i == 0) {
      ask_for(w.scales, w, block, c * GROUPS);
      if (w.minimums.values != nullptr) ask_for(w.minimums, w, block, c * GROUPS);
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g += kEach) {
      vi sums[kEach][ROWS][kChains];
      for (auto& of_group : sums) {
        for (auto& of_row : of_group) {
          for (vi& one : of_row) one = all(0);
        }
      }
      add_dots<GROUPS, AHEAD>(w, codes, i, g, at, bytes, sums);
#pragma GCC unroll 4
      for (int k = 0; k < kEach; ++k) {
        const int32_t of = c * GROUPS + g + k;
        const Group group(w, block, of, i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const Row row(const_cast<char*>(rows) + r * bytes, w, w.groups);
          vi sum = sums[k][r][0];
          for (int n = 1; n < kChains; ++n) sum = add(sum, sums[k][r][n]);
          const float offset = row.offsets[of];
          if (has_least(w)) {
            acc[r] = add_group<true>(group, to_float(sum), row.scales[of], offset, acc[r]);
          } else {
            sum = add(sum, all(__builtin_bit_cast(int32_t, offset)));
            acc[r] = add_group<false>(group, to_float(sum), row.scales[of], offset, acc[r]);
          }
        }
      }
    }
  }

  // Adds a chunk's products of EACH groups from `g` on: of 8 bits some vectors have them, of 4 bits some
  // planes of all vectors.
  template <int GROUPS, int64_t AHEAD, int EACH, int ROWS, int CHAINS>
  __attribute__((always_inline)) static void add_dots(const PackedCodes& w, const uint8_t* codes,
                                                      int i, int g, const char* rows, size_t bytes,
                                                      vi (&sums)[EACH][ROWS][CHAINS]) {
    constexpr bool kWhole = KIND == kEight;
    constexpr int kVectors = kWhole ? 16 * EACH / GROUPS : 16;
    constexpr int kPlanes = !kWhole ? (Dots::kBytes && GROUPS == 1 ? 2 : 4) : Dots::kBytes ? 1 : 2;
    const int from = kWhole ? g * 16 / GROUPS : 0;
#pragma GCC unroll 16
    for (int v = from; v < from + kVectors; ++v) {
      const uint8_t* at = codes + v * kCodeBytes;
      if (i == 0 && (kWhole || g == 0)) ask_for<AHEAD>(at);
      const vi words = load_bytes(at + 4 * i);
      const auto add_plane = [&](auto plane) {
        constexpr int kPlane = decltype(plane)::value;
        const int group = (kWhole ? v * GROUPS / 16 : kPlane * GROUPS / 4) - g;
        if (kPlane >= kPlanes || group < 0 || group >= EACH) return;
        const vi weights = Dots::kBytes ? bytes_of<KIND, kPlane % 2>(w, words)
                                        : plane_of<KIND, kPlane>(w, words);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          int32_t word;
          __builtin_memcpy(&word, rows + r * bytes + 64 * kPlane + 4 * v, 4);
          vi& sum = sums[group][r][(v + kPlane) % CHAINS];
          sum = Dots::dot(weights, all(word), sum);
        }
      };
      add_plane(std::integral_constant<int, 0>());
      add_plane(std::integral_constant<int, 1>());
      if constexpr (!kWhole) {
        add_plane(std::integral_constant<int, 2>());
        add_plane(std::integral_constant<int, 3>());
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
