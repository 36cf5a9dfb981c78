// A plan as work items: which rows attend to which tokens in one go, and what is merged afterwards.
#pragma once

#include <vector>

#include "attention.h"

namespace onestem {

// A copy of an AttentionPlan's arrays (docs/attention-plan.md).
struct Plan {
  int32_t page_size;
  int32_t window;  // 0: none
  std::vector<int32_t> run_pages;
  std::vector<Run> runs;
  std::vector<Span> spans;
  std::vector<int32_t> row_position;  // of rows, then of moved ones
  std::vector<int32_t> moved;         // the row that each is, as it sees what lies elsewhere

  int32_t num_queries() const { return static_cast<int32_t>(row_position.size()); }
  int32_t num_rows() const { return num_queries() - static_cast<int32_t>(moved.size()); }
  // Whose result a query is a part of.
  int32_t row_of(int32_t query) const {
    return query < num_rows() ? query : moved[query - num_rows()];
  }
};

struct Heads {
  int32_t q_heads, kv_heads, dim;
  int32_t group() const { return q_heads / kv_heads; }
};

// What decides which runs get items of their own and how items are cut.
struct CostModel {
  Rates rates;
  int32_t element_bytes;
  float item = 500;         // nanoseconds to begin and end an item
  float shortest = 20'000;  // nanoseconds: no item is cut shorter
  int32_t cuts = 4;         // an item is at most 1 / (cuts * threads) of all work, if cut it can be
};

struct WorkList {
  std::vector<Item> items;  // longest first; before them those that leave states, last those that go on
  std::vector<Piece> pieces;
  std::vector<int32_t> rows;    // [parts], of queries
  std::vector<int32_t> states;  // [parts], -1: the row's only part, and of its own query
  std::vector<Merge> merges;    // [num_rows]
  std::vector<int32_t> handed;  // [num_rows]
  std::vector<int32_t> empty_rows;
  int32_t num_states = 0, num_leaving = 0;
  bool grid = false;
  double cost = 0;  // nanoseconds of one core

  WorkView view(const Plan& plan) const;
};

// How items may be cut. `share` false: no token is read for rows of two spans together. `grid`: where
// they are cut depends on positions alone. Tiles lie on the grid; wide items fold them in order, from
// nothing in each segment (`segment_size`), and the states of segments are folded in order: by
// the item that begins with a row's first segment, or by the merge. A row's result then has the same
// bits whatever the plan's other rows, runs and sharing are. In the segment in which rows part, one
// item walks the tiles that they share, and their own items go on from its states.
struct Rules {
  bool share, grid;
};

// Items that together show each row what the plan shows it, each token once. On the grid the spans of
// a row have to follow one another without a gap; std::invalid_argument where they do not.
WorkList make_work(const Plan& plan, const Rules& rules, const Heads& heads,
                   const KernelsOf& kernels, const CostModel& cost, int32_t threads);

}  // namespace onestem
