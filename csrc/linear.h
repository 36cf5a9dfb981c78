// Products of rows with a weight of 8 or 4 bits: plain data, for the kernels and for who calls them.
// Rows are rounded to int8 for channels; for groups it depends on the way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onestem {

// Bytes of an output's row in a chunk: 64 codes, or 128 of 4 bits.
constexpr int32_t kCodeBytes = 64;

// What codes of groups are: numbers of 4 or 8 bits, or places in a table of 16 bytes.
enum CodeKind : int32_t { kFour = 0, kTable = 1, kEight = 2, kNumCodeKinds = 3 };

// A number for each output and group, [out / 16][groups][16]. In two levels, an int8 times a float16
// for each 2^shift groups, [out / 16][groups >> shift][16].
struct GroupNumbers {
  const void* values;  // null: there are none
  const void* supers;  // null: one level
  int32_t kind;        // a Dtype, of one level
  int32_t shift;
};

// y = x W^T + bias with W[o, i] = value * scale[o, i / group] + minimum[o, i / group], where the value
// is code[o, i] - zero[o, i / group], or table[code[o, i]] - zero.
//
// Codes stand in blocks of 16 outputs, in chunks along the inputs: [out / 16][chunk][16][64 bytes]. 8
// bits: a byte is an input. 4 bits: bits 4n..4n+3 of the 16-bit word j are input 32n + j of 128. Of
// groups each 16 x 64 bytes are turned: [16 words of 32 bits][16 outputs].
// What lacks at the end of a chunk has scale 0, or meets rows that are 0 there.
struct PackedCodes {
  const uint8_t* codes;
  GroupNumbers scales;    // of channels: float32 [out]
  GroupNumbers minimums;  // then there are no zeros
  const uint8_t* zeros;   // [out / 16][groups][16]; null: `zero` everywhere
  const uint8_t* table;   // kTable: 16 values
  int32_t zero;
  CodeKind kind;
  int32_t group;   // 32, 64 or 128; of 8 bits: 16, 32 or 64; 0: channels of 8 bits, whose zero is 128
  int32_t pairs;   // of blocks
  int32_t chunks;
  int32_t depth;   // inputs, those that lack at the end of a chunk among them
  int32_t groups;  // depth / group
};

struct LinearCall {
  PackedCodes weight;
  const float* bias;  // [out], or null
  const void* x;      // [rows, in], one behind the other
  void* y;            // [rows, out], rows `y_stride` apart
  int64_t y_stride, rows;
  int32_t in, out;
  char* packed;  // panels of rows as `LinearPath::pack` writes them
};

// A way to multiply: rows are packed first, in panels, then pairs of blocks multiplied.
struct LinearPath {
  int32_t panel;  // rows
  size_t (*panel_bytes)(const PackedCodes&);
  size_t (*scratch_bytes)(const LinearCall&);  // of either function
  int32_t (*pairs)(const LinearCall&);  // that one call had better multiply
  // By types of x, of y.
  void (*pack[3])(const LinearCall&, int64_t begin, int64_t end, char* scratch);
  void (*multiply[3])(const LinearCall&, int32_t begin, int32_t end, char* scratch);
};

struct LinearWays {
  LinearPath few, many;
  int32_t most_few;  // rows that `few` takes
};

// Of one kind of codes.
struct LinearKernels {
  LinearWays of[3];  // by the type of x
};

}  // namespace onestem
