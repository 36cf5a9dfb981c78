// Attention of many query rows over the same tokens: per KV head two matrix products for each tile
// of keys, with an online softmax between them.
#pragma once

namespace onestem::ONESTEM_ISA {

// Neighbouring lanes whose products share registers, and what their rows see of a piece.
struct Block {
  int32_t lane, vecs;
  int32_t first_min, first_max, end_min, end_max;
};

// Keys k0..k1-1 of a tile that starts at position `start`. `masked`: not every lane sees all of them.
struct Keys {
  int32_t start, k0, k1;
  bool masked;
};

template <class T, class Products>
class WideItem {
 public:
  using Element = typename Products::Element;

  // Query rows (times group) that an item takes.
  static int32_t max_lanes(int32_t dim) { return clamp(Products::kLaneElements / dim, 96, 512); }

  static size_t scratch_bytes(int32_t dim) {
    WideItem item;
    Scratch scratch(nullptr);
    item.layout(scratch, dim);
    return scratch.used();
  }

  static void attend(const AttentionCall& call, const Item& item, char* memory) {
    WideItem wide;
    Scratch scratch(memory);
    wide.layout(scratch, call.dim);
    wide.call_ = &call;
    wide.item_ = &item;
    wide.special_ = is_special(call);
    wide.cut_blocks();
    Products::begin_item();
    for (int32_t h = 0; h < item.num_heads; ++h) wide.attend_head(item.head + h);
    Products::end_item();
  }

 private:
  void layout(Scratch& scratch, int32_t dim) {
    const int32_t lanes = max_lanes(dim) + Products::kMaxVecs * kLanes;
    queries_ = scratch.take<Element>(int64_t{lanes} * Products::query_rows(dim));
    now_ = Sums(scratch, lanes, Products::out_rows(dim));
    before_ = Sums(scratch, lanes, Products::out_rows(dim));
    keys_ = scratch.take<Element>(Products::key_elements(dim));
    values_ = scratch.take<Element>(Products::value_elements(dim));
    scores_ = scratch.take<float>(Products::kTileKeys * Products::kMaxVecs * kLanes);
    weights_ = scratch.take<Element>(Products::weight_elements());
    rows_ = scratch.take<float>(8 * Products::out_rows(dim));
    slope_ = scratch.take<float>(lanes);
    position_ = scratch.take<float>(lanes);
    first_ = scratch.take<int32_t>(lanes);
    end_ = scratch.take<int32_t>(lanes);
    bounds_ = scratch.take<Bounds>(lanes);
    blocks_ = scratch.take<Block>(lanes / kLanes);
    tiles_ = scratch.take<Tile>(2);
  }

  int32_t num_lanes() const { return item_->num_rows * call_->group; }
  int32_t part_of(int32_t lane) const { return item_->rows_at + lane / call_->group; }
  int32_t q_head(int32_t lane) const { return head_ * call_->group + lane % call_->group; }

  void cut_blocks() {
    int32_t vecs = round_up(num_lanes(), kLanes) / kLanes;
    num_blocks_ = 0;
    for (int32_t lane = 0; vecs > 0;) {
      // Four vectors are better two and two than three and one.
      const int32_t most = Products::kMaxVecs == 3 && vecs == 4 ? 2 : Products::kMaxVecs;
      const int32_t take = smaller(vecs, most);
      blocks_[num_blocks_++] = {lane, take, 0, 0, 0, 0};
      lane += take * kLanes;
      vecs -= take;
    }
  }

  void attend_head(int32_t head) {
    head_ = head;
    k_ = static_cast<const T*>(call_->k) + head * call_->pages.head;
    v_ = static_cast<const T*>(call_->v) + head * call_->pages.head;
    for (int32_t b = 0; b < num_blocks_; ++b) begin(blocks_[b]);
    const int32_t keys = call_->work.grid ? Products::kGridKeys : Products::kTileKeys;
    walk_tiles(*call_, *item_, keys, tiles_, bounds_, *this);
    for (int32_t b = 0; b < num_blocks_; ++b) finish(blocks_[b]);
  }

  template <class Walker>
  friend void walk_tiles(const AttentionCall&, const Item&, int32_t, Tile*, Bounds*, Walker&);

  // A segment begins without states; what was summed so far waits for its end.
  void begin_segment() {
    exchange(now_, before_);
    for (int32_t b = 0; b < num_blocks_; ++b) clear(blocks_[b]);
  }

  void fold_segment() {
    for (int32_t b = 0; b < num_blocks_; ++b) {
      const int32_t lanes = blocks_[b].vecs * kLanes, rows = Products::out_rows(call_->dim);
      for (int32_t l = 0; l < lanes; l += kLanes) {
        const int32_t lane = blocks_[b].lane + l;
        const Fold fold(load(before_.top + lane), load(now_.top + lane));
        store(now_.top + lane, fold.top);
        store(now_.sum + lane, fold(load(before_.sum + lane), load(now_.sum + lane)));
        const int64_t at = int64_t{blocks_[b].lane} * rows + l;
        for (int32_t d = 0; d < rows; ++d) {
          float* more = now_.out + at + d * lanes;
          store(more, fold(load(before_.out + at + d * lanes), load(more)));
        }
      }
    }
  }

  // A lane's query row, or null behind the last lane.
  const T* query(int32_t lane) const {
    if (lane >= num_lanes()) return nullptr;
    const int32_t row = call_->work.rows[part_of(lane)];
    return static_cast<const T*>(call_->q) + (int64_t{row} * call_->q_heads + q_head(lane)) * call_->dim;
  }

  void begin(const Block& block) {
    const int32_t lanes = block.vecs * kLanes;
    for (int32_t lane = 0; lane < lanes; lane += 8) pack_queries(block, lane);
    clear(block);
    for (int32_t lane = block.lane; lane < block.lane + lanes; ++lane) set_lane(lane);
    const int32_t stop = smaller(lanes, num_lanes() - block.lane);
    float* out = now_.out + int64_t{block.lane} * Products::out_rows(call_->dim);
    for (int32_t l = 0; l < stop; ++l) go_on(block.lane + l, out + l, lanes);
  }

  // `out`: of the lane, elements `stride` apart.
  void go_on(int32_t lane, float* out, int32_t stride) {
    const float* values = handed_state(*call_, *item_, part_of(lane), q_head(lane), now_.top[lane], now_.sum[lane]);
    for (int32_t d = 0; values != nullptr && d < call_->dim; ++d) out[d * stride] = values[d];
  }

  void clear(const Block& block) {
    const int32_t lanes = block.vecs * kLanes;
    float* out = now_.out + int64_t{block.lane} * Products::out_rows(call_->dim);
    const int64_t size = int64_t{lanes} * Products::out_rows(call_->dim);
    for (int64_t i = 0; i < size; ++i) out[i] = 0.0f;
    for (int32_t lane = block.lane; lane < block.lane + lanes; ++lane) {
      now_.top[lane] = -kInfinity;
      now_.sum[lane] = 0.0f;
    }
  }

  // Eight lanes from `lane` of the block on, as columns of the block's queries.
  void pack_queries(const Block& block, int32_t lane) {
    const int32_t depth = Products::query_rows(call_->dim), lanes = block.vecs * kLanes;
    Element* rows = reinterpret_cast<Element*>(rows_);
    for (int32_t i = 0; i < 8 * depth; ++i) rows[i] = 0;
    for (int32_t i = 0; i < 8; ++i) {
      const T* q = query(block.lane + lane + i);
      if (q != nullptr) Products::pack_query(q, call_->dim, rows + i * depth);
    }
    float* to = reinterpret_cast<float*>(queries_ + int64_t{block.lane} * depth) + lane;
    for (int32_t d = 0; d < depth; d += 8) transpose8(rows_ + d, depth, to + d * lanes, lanes);
  }

  void set_lane(int32_t lane) {
    slope_[lane] = position_[lane] = 0.0f;
    if (call_->alibi_slopes == nullptr || lane >= num_lanes()) return;
    slope_[lane] = call_->alibi_slopes[q_head(lane)];
    position_[lane] = static_cast<float>(call_->work.row_position[call_->work.rows[part_of(lane)]]);
  }

  void begin_piece() {
    for (int32_t b = 0; b < num_blocks_; ++b) set_bounds(blocks_[b]);
  }

  void set_bounds(Block& block) {
    block.first_min = block.end_min = INT32_MAX;
    block.first_max = block.end_max = INT32_MIN;
    for (int32_t lane = block.lane; lane < block.lane + block.vecs * kLanes; ++lane) {
      // Lanes behind the last see what the last row sees: they cost no mask of their own.
      const Bounds& row = bounds_[smaller(lane / call_->group, item_->num_rows - 1)];
      first_[lane] = row.first;
      end_[lane] = row.end;
      block.first_min = smaller(block.first_min, row.first);
      block.first_max = larger(block.first_max, row.first);
      block.end_min = smaller(block.end_min, row.end);
      block.end_max = larger(block.end_max, row.end);
    }
  }

  void attend_tile(Tile& tile, const Tile* next) {
    const int32_t padded = round_up(tile.count, Products::kKeyStep);
    for (int32_t i = tile.count; i < padded; ++i) tile.offsets[i] = tile.offsets[tile.count - 1];
    Products::pack_keys(k_, tile.offsets, padded, call_->dim, keys_);
    Products::pack_values(v_, tile.offsets, padded, call_->dim, values_);
    fetch_ = next == nullptr ? Fetch() : fetch_of(*next);
    for (int32_t b = 0; b < num_blocks_; ++b) {
      const Block& block = blocks_[b];
      int32_t k0 = larger(0, block.first_min - tile.start);
      int32_t k1 = smaller(tile.count, block.end_max - tile.start);
      if (k0 >= k1) continue;
      k0 = k0 / Products::kKeyStep * Products::kKeyStep;
      k1 = round_up(k1, Products::kKeyStep);
      const bool masked =
          block.first_max > tile.start + k0 || block.end_min < tile.start + k1;
      attend_block(block, {tile.start, k0, k1, masked});
    }
  }

  // The next tile's keys and values come from memory while this one is computed.
  Fetch fetch_of(const Tile& next) const {
    const int32_t calls = num_blocks_ * Products::fetches(call_->dim);
    return Fetch(next, k_, v_, sizeof(T), int64_t{call_->dim} * sizeof(T), calls);
  }

  void attend_block(const Block& block, const Keys& keys) {
    switch (block.vecs) {
      case 1: return attend_lanes<1>(block, keys);
      case 2: return attend_lanes<smaller(2, Products::kMaxVecs)>(block, keys);
      default: return attend_lanes<Products::kMaxVecs>(block, keys);
    }
  }

  template <int VECS>
  void attend_lanes(const Block& block, const Keys& keys) {
    const int32_t dim = call_->dim;
    const Element* queries = queries_ + int64_t{block.lane} * Products::query_rows(dim);
    for (int32_t k = keys.k0; k < keys.k1; k += Products::kKeyStep) {
      Products::template scores<VECS>(queries, keys_, k, dim, scores_);
      if constexpr (Products::kFetchesWithScores) fetch_();
    }
    if (special_) adjust<VECS>(block, keys);
    if (keys.masked) mask<VECS>(block, keys);
    const vf scale = all(special_ ? kLog2e : call_->scale * kLog2e);
    vf minus_top[VECS], rescale[VECS], sums[VECS] = {};
    raise_tops<VECS>(block, keys, scale, minus_top, rescale);
    const Element* weights = Products::template weigh<VECS>(scores_, weights_, keys.k0, keys.k1,
                                                            scale, minus_top, sums, fetch_);
    for (int v = 0; v < VECS; ++v) {
      float* sum = now_.sum + block.lane + v * kLanes;
      store(sum, fma(load(sum), rescale[v], sums[v]));
    }
    Products::template accumulate<VECS>(values_, weights, keys.k0, keys.k1, dim, rescale,
                                        now_.out + int64_t{block.lane} * Products::out_rows(dim),
                                        fetch_);
  }

  // Takes the tile's scores into the running maxima, which are kept times `scale`.
  template <int VECS>
  void raise_tops(const Block& block, const Keys& keys, vf scale, vf (&minus_top)[VECS],
                  vf (&rescale)[VECS]) {
    vf best[VECS];
    find_best<VECS>(keys, best);
    for (int v = 0; v < VECS; ++v) {
      float* top = now_.top + block.lane + v * kLanes;
      const vf old = load(top), now = max(old, best[v] * scale);
      // Where nothing was seen yet, any finite stand-in for -inf makes all weights 0.
      minus_top[v] = zeros() - max(now, all(-3e38f));
      rescale[v] = exp2(old + minus_top[v]);
      store(top, now);
    }
  }

  // Several chains of maxima, since each waits some cycles for the one before it.
  template <int VECS>
  void find_best(const Keys& keys, vf (&best)[VECS]) {
    constexpr int kChains = 4;  // keys come in multiples of it
    vf chains[kChains][VECS];
    for (auto& chain : chains) {
      for (int v = 0; v < VECS; ++v) chain[v] = all(-kInfinity);
    }
    for (int32_t k = keys.k0; k < keys.k1; k += kChains) {
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) {
          chains[i][v] = max(chains[i][v], load(scores_ + ((k + i) * VECS + v) * kLanes));
        }
      }
    }
    for (int v = 0; v < VECS; ++v) {
      best[v] = chains[0][v];
      for (int i = 1; i < kChains; ++i) best[v] = max(best[v], chains[i][v]);
    }
  }

  // What the scale alone does not say: softcap, then ALiBi.
  template <int VECS>
  void adjust(const Block& block, const Keys& keys) {
    const vf softcap = all(call_->softcap);
    for (int32_t k = keys.k0; k < keys.k1; ++k) {
      const vf position = all(static_cast<float>(keys.start + k));
      for (int v = 0; v < VECS; ++v) {
        float* at = scores_ + (k * VECS + v) * kLanes;
        const int32_t lane = block.lane + v * kLanes;
        vf score = load(at) * all(call_->scale);
        if (call_->softcap != 0.0f) score = softcap * tanh(score / softcap);
        store(at, fma(load(slope_ + lane), position - load(position_ + lane), score));
      }
    }
  }

  template <int VECS>
  void mask(const Block& block, const Keys& keys) {
    vi first[VECS], end[VECS];
    for (int v = 0; v < VECS; ++v) {
      first[v] = load(first_ + block.lane + v * kLanes);
      end[v] = load(end_ + block.lane + v * kLanes);
    }
    for (int32_t k = keys.k0; k < keys.k1; ++k) {
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) {
        float* at = scores_ + (k * VECS + v) * kLanes;
        store(at, visible(load(at), first[v], end[v], keys.start + k));
      }
    }
  }

  void finish(const Block& block) {
    if constexpr (Products::kOutByLane) return finish_by_lane(block);
    const int32_t lanes = block.vecs * kLanes, dim = call_->dim;
    const float* out = now_.out + int64_t{block.lane} * Products::out_rows(dim);
    for (int32_t l = 0; l < lanes && block.lane + l < num_lanes(); l += 8) {
      for (int32_t d = 0; d < dim; d += 8) {
        transpose8(out + int64_t{d} * lanes + l, lanes, rows_ + d, dim);
      }
      const int32_t stop = smaller(8, num_lanes() - block.lane - l);
      for (int32_t i = 0; i < stop; ++i) finish_lane(block.lane + l + i, rows_ + i * dim);
    }
  }

  void finish_by_lane(const Block& block) {
    const int32_t width = Products::out_rows(call_->dim);
    const int32_t stop = smaller(block.vecs * kLanes, num_lanes() - block.lane);
    const float* out = now_.out + int64_t{block.lane} * width;
    for (int32_t l = 0; l < stop; ++l) finish_lane(block.lane + l, out + l * width);
  }

  void finish_lane(int32_t lane, const float* values) {
    store_partial<T>(*call_, part_of(lane), q_head(lane), {values, now_.top[lane], now_.sum[lane]});
  }

  const AttentionCall* call_;
  const Item* item_;
  const T *k_, *v_;
  Element *queries_, *keys_, *values_, *weights_;
  Sums now_, before_;  // of the segment, and of those before it
  float *scores_, *rows_, *slope_, *position_;
  int32_t *first_, *end_;
  Bounds* bounds_;
  Block* blocks_;
  Tile* tiles_;
  Fetch fetch_;
  int32_t num_blocks_ = 0, head_ = 0;
  bool special_ = false;
};

}  // namespace onestem::ONESTEM_ISA
