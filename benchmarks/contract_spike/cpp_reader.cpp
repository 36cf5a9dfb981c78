// A C++ reader of plans: the plan's arrays as raw pointers. `plan_attend`: plain float32 loops, one online softmax
// per (row, query head) carried across spans; each token of a span is found once and used for all rows that see it.
// `plan_items`: the work items of items.py, made natively by the same rules.
//
//   g++ -O3 -march=native -shared -fPIC -o cpp_reader.so cpp_reader.cpp

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Span {  // one row of AttentionPlan.spans
  int32_t row, rows, run, first, first_step, end, end_step;
};
static_assert(sizeof(Span) == 7 * sizeof(int32_t));

}  // namespace

extern "C" void plan_attend(
    int64_t page_size, const int32_t* run_pages, const int32_t* run_page_start, const int32_t* run_offset,
    const Span* spans, int64_t num_spans, int64_t num_rows,  //
    const float* q,                                          // [num_rows, kv_heads * group, dim]
    const float* k, const float* v,                          // [num_pages, page_size, kv_heads, dim]
    int64_t kv_heads, int64_t group, int64_t dim, float scale,
    float* out,    // [num_rows, kv_heads * group, dim]
    float* lse) {  // [num_rows, kv_heads * group]
  const int64_t heads = kv_heads * group;
  std::vector<float> top(num_rows * heads, kNone), sum(num_rows * heads, 0.0f);
  std::fill(out, out + num_rows * heads * dim, 0.0f);
  for (const Span* s = spans; s != spans + num_spans; ++s) {
    const int32_t* pages = run_pages + run_page_start[s->run];
    const int64_t last = s->end + int64_t(s->rows - 1) * s->end_step;
    for (int64_t token = s->first; token < last; ++token) {
      const int64_t index = run_offset[s->run] + token;
      const int64_t slot = pages[index / page_size] * page_size + index % page_size;
      // Row j sees the token if first + j * first_step <= token < end + j * end_step.
      const int64_t from = s->end_step ? std::max<int64_t>(0, token - s->end + 1) : (token < s->end ? 0 : s->rows);
      const int64_t to = s->first_step ? std::min<int64_t>(s->rows, token - s->first + 1) : s->rows;
      for (int64_t j = from; j < to; ++j) {
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t state = (s->row + j) * heads + h;
          const float* key = k + (slot * kv_heads + h / group) * dim;
          const float* value = v + (slot * kv_heads + h / group) * dim;
          const float* query = q + state * dim;
          float* total = out + state * dim;
          float score = 0.0f;
          for (int64_t d = 0; d < dim; ++d) score += query[d] * key[d];
          score *= scale;
          if (score > top[state]) {
            const float shrink = std::exp(top[state] - score);
            for (int64_t d = 0; d < dim; ++d) total[d] *= shrink;
            sum[state] *= shrink;
            top[state] = score;
          }
          const float weight = std::exp(score - top[state]);
          sum[state] += weight;
          for (int64_t d = 0; d < dim; ++d) total[d] += weight * value[d];
        }
      }
    }
  }
  for (int64_t state = 0; state < num_rows * heads; ++state) {
    lse[state] = sum[state] > 0 ? top[state] + std::log(sum[state]) : kNone;
    for (int64_t d = 0; d < dim && sum[state] > 0; ++d) out[state * dim + d] /= sum[state];
  }
}

struct Items {  // see items.py; the caller gives the room
  int32_t* items;
  int32_t* walk;
  int32_t* rows;
  int32_t* dest;
  int32_t* merges;
};

// counts: items, walk entries, parts, merges. Returns 0, or -1 where the room does not suffice.
extern "C" int plan_items(
    const Span* spans, int64_t num_spans, int64_t num_rows, int64_t num_runs, int64_t merge_tokens,
    int64_t block_rows, int64_t target_items, int64_t min_tokens, Items to, int64_t room, int64_t* counts) {
  std::vector<int32_t> atom_of(num_rows + 1, 0);  // first 1 where an atom begins, then the atom's number
  for (const Span* s = spans; s != spans + num_spans; ++s) atom_of[s->row] = atom_of[s->row + s->rows] = 1;
  atom_of[0] = atom_of[num_rows] = 1;
  std::vector<int32_t> bounds;
  for (int64_t row = 0, n = 0; row <= num_rows; ++row) {
    if (atom_of[row]) bounds.push_back(row);
    n += atom_of[row];
    atom_of[row] = n - 1;
  }
  const int64_t num_atoms = bounds.size() - 1;

  // Groups: spans over the same tokens of a run, chained behind their first.
  std::vector<int32_t> first_of_run(num_runs, -1), next(num_spans, -1), last(num_spans), leader(num_spans);
  std::map<std::array<int32_t, 3>, int32_t> others;  // of a run whose spans show different tokens
  std::vector<int64_t> rows_of(num_spans, 0), atoms_of(num_spans, 0);
  for (int32_t i = 0; i < num_spans; ++i) {
    const Span& s = spans[i];
    int32_t to_group = i;
    if (s.first_step == 0 && s.end_step == 0) {
      int32_t& f = first_of_run[s.run];
      if (f < 0) f = i;
      if (spans[f].first == s.first && spans[f].end == s.end) to_group = f;
      else to_group = others.try_emplace({s.run, s.first, s.end}, i).first->second;
    }
    leader[i] = to_group;
    if (to_group != i) next[last[to_group]] = i;
    last[to_group] = i;
    rows_of[to_group] += s.rows;
    atoms_of[to_group] += atom_of[s.row + s.rows] - atom_of[s.row];
  }

  std::vector<int32_t> own, entry_start(num_atoms + 1, 0);
  std::vector<uint8_t> is_own(num_spans, 0);
  for (int32_t i = 0; i < num_spans; ++i) {
    const Span& s = spans[i];
    if (leader[i] == i && s.first_step == 0 && s.end_step == 0 && atoms_of[i] > 1) {
      const int64_t saved = int64_t(s.end - s.first) * (atoms_of[i] - (rows_of[i] + block_rows - 1) / block_rows);
      is_own[i] = saved >= merge_tokens * rows_of[i];
      if (is_own[i]) own.push_back(i);
    }
    if (!is_own[leader[i]])
      for (int32_t a = atom_of[s.row]; a < atom_of[s.row + s.rows]; ++a) ++entry_start[a + 1];
  }
  for (int64_t a = 0; a < num_atoms; ++a) entry_start[a + 1] += entry_start[a];
  std::vector<int32_t> entries(entry_start[num_atoms]), at(entry_start.begin(), entry_start.end() - 1);
  for (int32_t i = 0; i < num_spans; ++i)
    if (!is_own[leader[i]])
      for (int32_t a = atom_of[spans[i].row]; a < atom_of[spans[i].row + spans[i].rows]; ++a) entries[at[a]++] = i;

  // One unit after the other: its rows in blocks, a block's tokens in pieces. `visit` gets the walk of a block.
  std::vector<int32_t> unit_rows, parts(num_rows, 0), nth;
  auto for_blocks = [&](auto visit) {
    for (int32_t group : own) {
      unit_rows.clear();
      for (int32_t i = group; i >= 0; i = next[i])
        for (int32_t j = 0; j < spans[i].rows; ++j) unit_rows.push_back(spans[i].row + j);
      for (int64_t b = 0; b < int64_t(unit_rows.size()); b += block_rows)
        visit(&unit_rows[b], std::min<int64_t>(block_rows, unit_rows.size() - b), &group, 1, int64_t(-1));
    }
    for (int64_t a = 0; a < num_atoms; ++a) {
      if (entry_start[a] == entry_start[a + 1]) continue;
      unit_rows.clear();
      for (int32_t row = bounds[a]; row < bounds[a + 1]; ++row) unit_rows.push_back(row);
      for (int64_t b = 0; b < int64_t(unit_rows.size()); b += block_rows)
        visit(&unit_rows[b], std::min<int64_t>(block_rows, unit_rows.size() - b), &entries[entry_start[a]],
              entry_start[a + 1] - entry_start[a], int64_t(unit_rows[b]));
    }
  };
  auto bounds_of = [&](int32_t i, int64_t row, int64_t rows, int64_t& first, int64_t& end, int64_t& hi) {
    const Span& s = spans[i];
    const int64_t skip = row < 0 ? 0 : row - s.row;
    first = s.first + skip * s.first_step;
    end = s.end + skip * s.end_step;
    hi = std::max(first, end + (rows - 1) * s.end_step);
  };
  int64_t total = 0;
  for_blocks([&](const int32_t*, int64_t n, const int32_t* walk, int64_t length, int64_t row) {
    for (int64_t e = 0; e < length; ++e) {
      int64_t first, end, hi;
      bounds_of(walk[e], row, n, first, end, hi);
      total += hi - first;
    }
  });
  const int64_t cut = std::max(min_tokens, (total + target_items - 1) / target_items);
  int64_t num_items = 0, num_walk = 0, num_parts = 0;
  bool fits = true;
  for_blocks([&](const int32_t* rows, int64_t n, const int32_t* walk, int64_t length, int64_t row) {
    int64_t before = 0, piece = -1;
    for (int64_t e = 0; e < length; ++e) {
      int64_t first, end, hi;
      bounds_of(walk[e], row, n, first, end, hi);
      for (int64_t lo = first; lo < hi;) {
        const int64_t stop = std::min(hi, first + ((before + lo - first) / cut + 1) * cut - before);
        fits = fits && num_items < room && num_walk < room && num_parts + n <= room;
        if (!fits) return;
        if ((before + lo - first) / cut != piece) {
          piece = (before + lo - first) / cut;
          int32_t* item = to.items + 4 * num_items++;
          item[0] = num_parts, item[1] = n, item[2] = num_walk, item[3] = 0;
          for (int64_t j = 0; j < n; ++j) to.rows[num_parts++] = rows[j], ++parts[rows[j]];
        }
        const Span& s = spans[walk[e]];
        const int64_t entry[8] = {s.run, first, s.first_step, end, s.end_step, lo, stop, 0};
        std::copy(entry, entry + 8, to.walk + 8 * num_walk++);
        ++to.items[4 * (num_items - 1) + 3];
        lo = stop;
      }
      before += hi - first;
    }
  });
  if (!fits) return -1;
  int64_t num_merges = 0, place = 0;
  nth.assign(num_rows, -1);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (parts[row] == 1) continue;
    const int64_t merge[4] = {row, place, parts[row], 0};
    std::copy(merge, merge + 4, to.merges + 4 * num_merges++);
    nth[row] = place;
    place += parts[row];
  }
  for (int64_t p = 0; p < num_parts; ++p) to.dest[p] = nth[to.rows[p]] < 0 ? -1 : nth[to.rows[p]]++;
  counts[0] = num_items, counts[1] = num_walk, counts[2] = num_parts, counts[3] = num_merges;
  return 0;
}
