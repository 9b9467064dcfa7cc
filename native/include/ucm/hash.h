// Content chain and object ids (the two steps of identity), over whole batches.
//
// Pure functions: no state, no allocation, no locks; any thread may call them. Buffers belong to the
// caller. The byte formats are fixed for ever (tests/vectors/identity.json).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ucm::hash {

inline constexpr std::size_t kDigestBytes = 32;
inline constexpr std::size_t kIdBytes = 16;
using Digest = std::array<std::uint8_t, kDigestBytes>;

/// What else goes into one link beside its tokens: a digest over the multimodal items or prompt
/// embeddings that start in the link's block. `link` counts from the first link of the call.
struct Extra {
  std::uint64_t link = 0;
  const std::uint8_t* digest = nullptr;  ///< kDigestBytes, owned by the caller
};

/// SHA-256 of one buffer.
[[nodiscard]] Digest sha256(std::span<const std::uint8_t> bytes) noexcept;

/// The tokens of a call: those left over from earlier calls, then the new ones. Ids over 2^32-1 are
/// possible in the 64-bit array only.
struct Tokens {
  std::span<const std::uint64_t> pending;
  std::span<const std::uint32_t> narrow;  ///< the new ids, or
  std::span<const std::uint64_t> wide;    ///< the new ids (one of the two is empty)
  [[nodiscard]] std::size_t size() const noexcept {
    return pending.size() + narrow.size() + wide.size();
  }
};

/// Append links: link i covers tokens [i*block, (i+1)*block) of `tokens`, for
/// i < out.size() / kDigestBytes; that many whole blocks must be there.
///
///   plain_i = SHA-256(previous || ids)      ids: u32 LE each; if one is over 2^32-1, 0xff and u64 LE
///   c_i     = plain_i                                      without extras
///   c_i     = SHA-256("ucm/extralink/1" || plain_i || extra)  with an extra digest
///
/// `previous` is the last link so far, the namespace root, or empty. The tag makes the second form's
/// length 79 bytes, which no first form has, so the two cannot meet. `extras` ascend by link.
void extend_chain(std::span<const std::uint8_t> previous, const Tokens& tokens, std::size_t block,
                  std::span<const Extra> extras, std::span<std::uint8_t> out) noexcept;

/// id_i = first 16 bytes of SHA-256(seed || link_i); `links` and `out` hold the same number of rows,
/// and row i of `links` starts at i * link_stride bytes.
void object_ids(const Digest& seed, const std::uint8_t* links, std::size_t link_stride,
                std::size_t count, std::uint8_t* out) noexcept;

/// id_i = first 16 bytes of SHA-256(seed || link_i || position_i as u64 LE): snapshots.
void snapshot_ids(const Digest& seed, const std::uint8_t* links, std::size_t link_stride,
                  std::span<const std::uint64_t> positions, std::uint8_t* out) noexcept;

}  // namespace ucm::hash
