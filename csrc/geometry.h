// Where the bytes of an engine block are, in the paged cache and in a payload.
//
// Decision: a copy is a nest of at most token x head rows of contiguous bytes, and rows that are
// adjacent on both sides are joined: whole pieces where the cache's order is the payload's,
// [layer][token][head], single heads where it is not. The CPU form, the copy engines' descriptors
// and the kernel all use these functions, so there is one truth about every byte. They are
// constexpr so that the kernel can call them.
#pragma once
#include <cstdint>

namespace pds {

// The strides and widths that the regions of a part share.
struct Shape {
  int64_t block_stride, token_stride, head_stride;
  int64_t width, start, cell;
  int32_t num_heads;
  bool heads_joined;   // a token's heads are one run
  bool tokens_joined;  // all tokens of a piece are one run
};

// One engine block of one payload: `count` tokens, the first of which is `first` of `num_tokens`.
struct Block {
  uint64_t payload;  // where the payload's first layer is or would be
  int32_t id;
  int32_t num_tokens, first, count;
};

struct Rows {
  int32_t tokens, heads;
  int64_t bytes;  // of one row
};

constexpr Shape join(Shape s) {
  s.heads_joined = s.width == s.cell && (s.num_heads == 1 || s.head_stride == s.cell);
  s.tokens_joined = s.heads_joined && s.token_stride == s.num_heads * s.cell;
  return s;
}

constexpr Rows rows_of(const Shape &s, const Block &b) {
  if (!s.heads_joined) return {b.count, s.num_heads, s.width};
  if (!s.tokens_joined) return {b.count, 1, s.num_heads * s.cell};
  return {1, 1, b.count * s.num_heads * s.cell};
}

constexpr int64_t cache_offset(const Shape &s, const Block &b, int32_t token, int32_t head) {
  return b.id * s.block_stride + token * s.token_stride + head * s.head_stride;
}

constexpr int64_t layer_bytes(const Shape &s, int32_t num_tokens) {
  return num_tokens * s.num_heads * s.cell;
}

constexpr int64_t payload_offset(const Shape &s, const Block &b, int32_t layer, int32_t token,
                                 int32_t head) {
  const int64_t cell = int64_t{b.first + token} * s.num_heads + head;
  return layer * layer_bytes(s, b.num_tokens) + cell * s.cell + s.start;
}

// Which bits must be zero for a vector to fit at every row's start and end, bases excepted.
constexpr uint64_t alignment_bits(const Shape &s) {
  uint64_t bits = s.block_stride | s.start | (s.num_heads * s.cell);
  if (!s.tokens_joined) bits |= s.token_stride;
  if (!s.heads_joined) bits |= s.head_stride | s.cell | s.width;
  return bits;
}

}  // namespace pds
