// Keys, shapes, and the bytes that each key has: told by shape, key, shard and position alone, so that
// any process can say whether what it was given is right.
#pragma once

#include <cstring>

#include "board.h"
#include "ucm/block_id.h"
#include "ucm/geometry.h"

namespace ucm::chaos {

/// Shape 0: objects of 4 x 8 KiB. Shape 1: 2 x 3,000 bytes, with padding between its shards.
inline Geometry geometry_of(std::uint32_t shape) {
  Geometry g;
  g.shard_count = shape == 0 ? 4 : 2;
  g.shard_bytes = shape == 0 ? 8192 : 3000;
  g.runs_per_shard = 1;
  g.runs = {{g.shard_bytes, 1, 0}};
  g.layout = shape == 0 ? "chaos-a" : "chaos-b";
  return g;
}

inline std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

inline BlockId id_of(std::uint32_t shape, std::uint32_t key) {
  const std::uint64_t a = mix(std::uint64_t{shape} << 32 | key),
                      b = ~(std::uint64_t{shape} << 32 | key);
  BlockId id;
  std::memcpy(id.bytes.data(), &a, 8);
  std::memcpy(id.bytes.data() + 8, &b, 8);
  return id;
}

inline std::uint64_t word_of(std::uint32_t shape, std::uint32_t key, std::uint32_t shard,
                             std::uint64_t at) noexcept {
  return mix((std::uint64_t{shape} << 60) ^ (std::uint64_t{key} << 32) ^
             (std::uint64_t{shard} << 24) ^ at);
}

inline void fill(std::byte* to, std::uint32_t shape, std::uint32_t key, std::uint32_t shard,
                 std::uint64_t bytes) noexcept {
  for (std::uint64_t i = 0; i < bytes; i += 8) {
    const std::uint64_t w = word_of(shape, key, shard, i);
    std::memcpy(to + i, &w, bytes - i < 8 ? bytes - i : 8);
  }
}

/// Bytes that are not what they should be.
inline std::uint64_t wrong_bytes(const std::byte* at, std::uint32_t shape, std::uint32_t key,
                                 std::uint32_t shard, std::uint64_t bytes) noexcept {
  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < bytes; i += 8) {
    const std::uint64_t w = word_of(shape, key, shard, i);
    const std::uint64_t n = bytes - i < 8 ? bytes - i : 8;
    if (std::memcmp(at + i, &w, n) == 0) continue;
    for (std::uint64_t k = 0; k < n; ++k) {
      wrong += at[i + k] != reinterpret_cast<const std::byte*>(&w)[k] ? 1 : 0;
    }
  }
  return wrong;
}

}  // namespace ucm::chaos
