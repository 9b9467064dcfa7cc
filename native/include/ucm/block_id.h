// The 128-bit name of a stored object.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>

namespace ucm {

/// First 16 bytes of SHA-256(seed || chain link); see ucm_core/identity. All-zero is never a
/// valid id: it is refused at the border so that an empty placeholder cannot shift its neighbours.
struct BlockId {
  std::array<std::uint8_t, 16> bytes{};

  friend auto operator<=>(const BlockId&, const BlockId&) = default;
  [[nodiscard]] bool empty() const noexcept { return *this == BlockId{}; }
  /// The id is already uniformly distributed, so its first word is its hash.
  [[nodiscard]] std::uint64_t word() const noexcept {
    std::uint64_t w;
    std::memcpy(&w, bytes.data(), sizeof w);
    return w;
  }
};
static_assert(sizeof(BlockId) == 16);

struct BlockIdHash {
  std::size_t operator()(const BlockId& id) const noexcept { return id.word(); }
};

}  // namespace ucm
