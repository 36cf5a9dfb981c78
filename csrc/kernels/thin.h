// Attention of one or few query rows: keys and values are read once, straight from the pages, and
// multiplied with every query head that shares them. Memory sets the speed.
#pragma once

namespace onestem::ONESTEM_ISA {

// Products of at most this many query heads with one pass over keys or values: their sums stay in
// registers.
constexpr int kDotHeads = kThinSums == 8 ? 2 : 4;
constexpr int kSumHeads = 4;

template <class T>
class ThinItem {
 public:
  // Tokens whose scores are taken into the softmax at once.
  static constexpr int32_t kTokens = 128;
  // Places of a tile from which its tokens are taken in turn.
  static constexpr int32_t kStreams = 8;

  static size_t scratch_bytes(int32_t dim, int32_t kv_heads) {
    ThinItem item;
    Scratch scratch(nullptr);
    item.layout(scratch, dim, kv_heads);
    return scratch.used();
  }

  static void attend(const AttentionCall& call, const Item& item, char* memory) {
    ThinItem thin;
    Scratch scratch(memory);
    thin.layout(scratch, call.dim, item.num_heads);
    thin.call_ = &call;
    thin.item_ = &item;
    thin.lanes_ = item.num_rows * call.group;
    thin.special_ = is_special(call);
    thin.begin();
    thin.attend_tiles();
    thin.finish();
  }

 private:
  void layout(Scratch& scratch, int32_t dim, int32_t heads) {
    padded_dim_ = round_up(dim, kLanes);
    const int64_t states = int64_t{heads} * kThinLanes;
    queries_ = scratch.take<float>(states * padded_dim_);
    out_ = scratch.take<float>(states * padded_dim_);
    top_ = scratch.take<float>(states);
    sum_ = scratch.take<float>(states);
    scores_ = scratch.take<float>(states * kTokens);
    offsets_ = scratch.take<int64_t>(kTokens);
    tile_ = scratch.take<Tile>(1);
  }

  void begin() {
    const int64_t states = int64_t{item_->num_heads} * lanes_;
    for (int64_t i = 0; i < states * padded_dim_; ++i) out_[i] = queries_[i] = 0.0f;
    for (int64_t i = 0; i < states; ++i) {
      top_[i] = -kInfinity;
      sum_[i] = 0.0f;
      const int32_t lane = static_cast<int32_t>(i % lanes_);
      const int32_t row = call_->work.rows[item_->rows_at + lane / call_->group];
      const int64_t at = int64_t{row} * call_->q_heads + q_head(static_cast<int32_t>(i));
      const T* q = static_cast<const T*>(call_->q) + at * call_->dim;
      for_pairs(call_->dim, [&](int32_t d) {
        vf low, high;
        load_pair(q + d, low, high);
        store(queries_ + i * padded_dim_ + d, low);
        store(queries_ + i * padded_dim_ + d + kLanes, high);
      });
      for (int32_t d = paired(); d < call_->dim; d += 8) {
        convert8(q + d, queries_ + i * padded_dim_ + d);
      }
    }
  }

  // Elements of a head that are read in pairs of vectors, in the order of `load_pair`.
  int32_t paired() const { return call_->dim / (2 * kLanes) * (2 * kLanes); }

  // The query head of state i: states stand per KV head, in it per row, in it per query head.
  int32_t q_head(int32_t i) const {
    return (item_->head + i / lanes_) * call_->group + i % lanes_ % call_->group;
  }

  void attend_tiles() {
    TileWalk walk(*call_, *item_, kTokens);
    const Piece* piece = nullptr;
    while (walk.next(*tile_)) {
      if (tile_->piece != piece) {
        piece = tile_->piece;
        find_bounds(call_->work, *item_, *piece, bounds_);
      }
      if (all_seen(call_->work, *piece) || skip_unseen(*tile_, bounds_, item_->num_rows)) {
        attend_tile(*tile_);
      }
    }
  }

  // All heads of eight tokens at a time, first keys, then values. The tokens come from eight places
  // of the tile in turn: memory is then read as eight streams, each in order, which processors'
  // prefetchers follow best. (On Zen 3 one stream costs half as much again, and prefetch
  // instructions a third.)
  void attend_tile(const Tile& tile) {
    const int32_t padded = round_up(tile.count, larger(kStreams, kLanes));
    stride_ = padded / kStreams;
    for (int32_t i = 0; i < padded; ++i) {
      offsets_[i] = tile.offsets[smaller(token_of(i), tile.count - 1)];
    }
    in_memory_order(padded, [&](int32_t h, int32_t i) { score(h, i); });
    for (int32_t state = 0; state < item_->num_heads * lanes_; ++state) {
      const int32_t row = state % lanes_ / call_->group;
      if (special_) adjust(tile, padded, state, row);
      mask(tile, scores_ + state * kTokens, padded, row);
      weigh(scores_ + state * kTokens, padded, state);
    }
    in_memory_order(padded, [&](int32_t h, int32_t i) { accumulate(h, i); });
  }

  // visit(h, i) for each KV head and places i..i+7 of a tile.
  template <class Visit>
  void in_memory_order(int32_t count, Visit visit) {
    const int32_t heads = item_->num_heads;
    if (call_->pages.head > call_->pages.token) {
      for (int32_t h = 0; h < heads; ++h) {
        for (int32_t i = 0; i < count; i += 8) visit(h, i);
      }
    } else {
      for (int32_t i = 0; i < count; i += 8) {
        for (int32_t h = 0; h < heads; ++h) visit(h, i);
      }
    }
  }

  // Which token of the tile stands at place i of `offsets_` and of the scores.
  int32_t token_of(int32_t i) const { return i % kStreams * stride_ + i / kStreams; }

  const T* head_of(const void* pages, int32_t h) const {
    return static_cast<const T*>(pages) + (item_->head + h) * call_->pages.head;
  }

  // Scores at places i..i+7 for all lanes of KV head h.
  void score(int32_t h, int32_t i) {
    const T* k = head_of(call_->k, h);
    for (int32_t lane = 0; lane < lanes_;) {
      const int32_t take = smaller(lanes_ - lane, kDotHeads), state = h * lanes_ + lane;
      switch (take) {
        case 1: dots<1>(k, state, i); break;
        case 2: dots<2>(k, state, i); break;
        case 3: dots<smaller(3, kDotHeads)>(k, state, i); break;
        default: dots<kDotHeads>(k, state, i); break;
      }
      lane += take;
    }
  }

  template <int HEADS>
  void dots(const T* k, int32_t state, int32_t at) {
    constexpr int kKeys = HEADS == 1 || HEADS * 8 <= kThinSums ? 8 : 4;
    const float* queries = queries_ + int64_t{state} * padded_dim_;
    vf parts[HEADS][8];
    for (int i = 0; i < 8; i += kKeys) {
      dots_of<HEADS, kKeys>(queries, k, offsets_ + at + i, parts, i);
    }
    for (int h = 0; h < HEADS; ++h) sum_each(parts[h], scores_ + (state + h) * kTokens + at);
  }

  template <int HEADS, int KEYS>
  __attribute__((always_inline)) void dots_of(const float* queries, const T* k,
                                              const int64_t* offsets, vf (&parts)[HEADS][8],
                                              int at) {
    const T* keys[KEYS];
    for (int i = 0; i < KEYS; ++i) keys[i] = k + offsets[i];
    vf sums[HEADS][KEYS] = {};
    int32_t d = 0;
    for (; d + 2 * kLanes <= call_->dim; d += 2 * kLanes) {
      vf query[HEADS][2];
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) {
        query[h][0] = load(queries + h * padded_dim_ + d);
        query[h][1] = load(queries + h * padded_dim_ + d + kLanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < KEYS; ++i) {
        vf low, high;
        load_pair(keys[i] + d, low, high);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; ++h) {
          sums[h][i] = fma(query[h][1], high, fma(query[h][0], low, sums[h][i]));
        }
      }
    }
    for (; d < call_->dim; d += kLanes) {
#pragma GCC unroll 8
      for (int i = 0; i < KEYS; ++i) {
        const vf key = load_rest(keys[i], d);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; ++h) {
          sums[h][i] = fma(load(queries + h * padded_dim_ + d), key, sums[h][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
#pragma GCC unroll 8
      for (int i = 0; i < KEYS; ++i) parts[h][at + i] = sums[h][i];
    }
  }

  // Elements d.. of a head, at most a vector; 0 behind the last.
  vf load_rest(const T* p, int32_t d) const {
    const int32_t rest = call_->dim - d;
    return rest >= kLanes ? load(p + d) : load_some(p + d, rest);
  }

  // What the scale alone does not say: softcap, then ALiBi.
  void adjust(const Tile& tile, int32_t count, int32_t state, int32_t row) {
    float* scores = scores_ + state * kTokens;
    const vf softcap = all(call_->softcap);
    for (int32_t i = 0; i < count; i += kLanes) {
      vf score = load(scores + i) * all(call_->scale);
      if (call_->softcap != 0.0f) score = softcap * tanh(score / softcap);
      store(scores + i, score);
    }
    const float slope = call_->alibi_slopes ? call_->alibi_slopes[q_head(state)] : 0.0f;
    if (slope == 0.0f) return;
    const int32_t number = call_->work.rows[item_->rows_at + row];
    const int32_t distance = tile.start - call_->work.row_position[number];
    for (int32_t i = 0; i < count; ++i) {
      scores[i] += slope * static_cast<float>(distance + token_of(i));
    }
  }

  void mask(const Tile& tile, float* scores, int32_t count, int32_t row) {
    const int32_t first = bounds_[row].first - tile.start;
    const int32_t end = smaller(bounds_[row].end - tile.start, tile.count);
    if (first <= 0 && end >= count) return;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t token = token_of(i);
      if (token < first || token >= end) scores[i] = -kInfinity;
    }
  }

  // Scores of one query head become weights; what was summed before is scaled to the new maximum.
  void weigh(float* scores, int32_t count, int32_t state) {
    const float scale = special_ ? kLog2e : call_->scale * kLog2e;
    vf best = all(-kInfinity);
    for (int32_t t = 0; t < count; t += kLanes) best = max(best, load(scores + t));
    const float old = top_[state], highest = top_of(best) * scale;
    const float now = old > highest ? old : highest;
    // Where nothing was seen yet, any finite stand-in for -inf makes all weights 0.
    const float safe = now > -3e38f ? now : -3e38f;
    vf sums = zeros();
    for (int32_t t = 0; t < count; t += kLanes) {
      const vf weight = exp2(fma(load(scores + t), all(scale), all(-safe)));
      sums = sums + weight;
      store(scores + t, weight);
    }
    if (now != old) raise_top(state, now, exp2(all(old - safe)));
    sum_[state] += sum(sums);
  }

  void raise_top(int32_t state, float now, vf rescale) {
    float factor[kLanes];
    store(factor, rescale);
    top_[state] = now;
    sum_[state] *= factor[0];
    float* out = out_ + int64_t{state} * padded_dim_;
    for (int32_t d = 0; d < padded_dim_; d += kLanes) store(out + d, load(out + d) * rescale);
  }

  // out [lane][dim] += the values at places i..i+7 weighted, for all lanes of KV head h.
  void accumulate(int32_t h, int32_t i) {
    for (int32_t lane = 0; lane < lanes_;) {
      const int32_t take = smaller(lanes_ - lane, kSumHeads), state = h * lanes_ + lane;
      const Weights from{head_of(call_->v, h), offsets_ + i, scores_ + state * kTokens + i};
      switch (take) {
        case 1: weighted<1>(from, state); break;
        case 2: weighted<2>(from, state); break;
        case 3: weighted<3>(from, state); break;
        default: weighted<4>(from, state); break;
      }
      lane += take;
    }
  }

  // Eight values at `offsets` from v, and their weights for each of some states (kTokens apart).
  struct Weights {
    const T* v;
    const int64_t* offsets;
    const float* weights;
  };

  template <int HEADS>
  void weighted(const Weights& from, int32_t state) {
    constexpr int kPairs = clamp(kThinSums / HEADS / 2, 1, 4);
    float* out = out_ + int64_t{state} * padded_dim_;
    int32_t d = 0;
    for (; d + kPairs * 2 * kLanes <= call_->dim; d += kPairs * 2 * kLanes) {
      weighted_pairs<HEADS, kPairs>(from, d, out);
    }
    for (; d + 2 * kLanes <= call_->dim; d += 2 * kLanes) weighted_pairs<HEADS, 1>(from, d, out);
    for (; d < call_->dim; d += kLanes) weighted_rest<HEADS>(from, d, out);
  }

  template <int HEADS, int PAIRS>
  void weighted_pairs(const Weights& from, int32_t d, float* out) {
    vf sums[HEADS][2 * PAIRS] = {};
    for (int32_t t = 0; t < 8; ++t) {
      const T* v = from.v + from.offsets[t] + d;
      vf weight[HEADS];
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) weight[h] = all(from.weights[h * kTokens + t]);
#pragma GCC unroll 4
      for (int i = 0; i < PAIRS; ++i) {
        vf low, high;
        load_pair(v + 2 * i * kLanes, low, high);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; ++h) {
          sums[h][2 * i] = fma(weight[h], low, sums[h][2 * i]);
          sums[h][2 * i + 1] = fma(weight[h], high, sums[h][2 * i + 1]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
#pragma GCC unroll 8
      for (int i = 0; i < 2 * PAIRS; ++i) {
        float* at = out + h * padded_dim_ + d + i * kLanes;
        store(at, load(at) + sums[h][i]);
      }
    }
  }

  // The elements of a head behind its last pair of vectors.
  template <int HEADS>
  void weighted_rest(const Weights& from, int32_t d, float* out) {
    vf sums[HEADS];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) sums[h] = load(out + h * padded_dim_ + d);
    for (int32_t t = 0; t < 8; ++t) {
      const vf value = load_rest(from.v + from.offsets[t], d);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) {
        sums[h] = fma(all(from.weights[h * kTokens + t]), value, sums[h]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) store(out + h * padded_dim_ + d, sums[h]);
  }

  void finish() {
    for (int32_t i = 0; i < item_->num_heads * lanes_; ++i) {
      float* out = out_ + int64_t{i} * padded_dim_;
      for_pairs(call_->dim, [&](int32_t d) { in_order<T>(out + d); });
      const int32_t part = item_->rows_at + i % lanes_ / call_->group;
      store_partial<T>(*call_, part, q_head(i),
                       {out, top_[i], sum_[i]});
    }
  }

  const AttentionCall* call_;
  const Item* item_;
  float *queries_, *out_, *top_, *sum_, *scores_;
  int64_t* offsets_;
  Tile* tile_;
  Bounds bounds_[kThinLanes];
  int32_t lanes_ = 0, padded_dim_ = 0, stride_ = 0;
  bool special_ = false;
};

}  // namespace onestem::ONESTEM_ISA
