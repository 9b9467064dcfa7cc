// Step one of identity: the content chain.
#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

#include "hash/sha256.h"
#include "ucm/hash.h"

namespace ucm::hash {
namespace {

static_assert(std::endian::native == std::endian::little,
              "token ids and positions are hashed as they lie in memory");

constexpr std::uint64_t kMaxNarrow = 0xffffffffu;
constexpr std::uint8_t kWideMark = 0xff;
constexpr char kExtraTag[] = "ucm/extralink/1";
constexpr std::size_t kExtraTagBytes = sizeof(kExtraTag) - 1;
static_assert((kExtraTagBytes + 2 * kDigestBytes) % 4 == 3,
              "a link with extras must have a length that no plain link has (0 or 1 mod 4)");

/// Ids narrowed per step; large enough for one SHA-256 call to amortise, small enough for L1.
constexpr std::size_t kNarrowChunk = 256;

bool any_wide(std::span<const std::uint64_t> ids) noexcept {
  std::uint64_t all = 0;
  for (const std::uint64_t id : ids) all |= id;
  return all > kMaxNarrow;
}

void update_as_u32(Sha256& sha, std::span<const std::uint64_t> ids) noexcept {
  std::array<std::uint32_t, kNarrowChunk> chunk;
  while (!ids.empty()) {
    const std::size_t n = std::min(ids.size(), kNarrowChunk);
    for (std::size_t i = 0; i < n; ++i) chunk[i] = static_cast<std::uint32_t>(ids[i]);
    sha.update(chunk.data(), n * sizeof(std::uint32_t));
    ids = ids.subspan(n);
  }
}

void update_as_u64(Sha256& sha, std::span<const std::uint32_t> ids) noexcept {
  std::array<std::uint64_t, kNarrowChunk> chunk;
  while (!ids.empty()) {
    const std::size_t n = std::min(ids.size(), kNarrowChunk);
    for (std::size_t i = 0; i < n; ++i) chunk[i] = ids[i];
    sha.update(chunk.data(), n * sizeof(std::uint64_t));
    ids = ids.subspan(n);
  }
}

/// Hash one block's ids, whose pieces may come from two arrays. Whether the block is written in 4
/// or 8 bytes an id is decided over the whole block.
void update_block(Sha256& sha, const Tokens& tokens, std::size_t begin,
                  std::size_t count) noexcept {
  const std::size_t kept = tokens.pending.size();
  const std::size_t from_pending = begin < kept ? std::min(count, kept - begin) : 0;
  const std::size_t rest = count - from_pending;
  const std::size_t at = begin + from_pending - kept;  // only used when rest > 0
  const auto pending = from_pending > 0 ? tokens.pending.subspan(begin, from_pending)
                                        : std::span<const std::uint64_t>{};
  const bool is_narrow_array = tokens.wide.empty();
  const auto narrow = rest > 0 && is_narrow_array ? tokens.narrow.subspan(at, rest)
                                                  : std::span<const std::uint32_t>{};
  const auto wide = rest > 0 && !is_narrow_array ? tokens.wide.subspan(at, rest)
                                                 : std::span<const std::uint64_t>{};
  if (any_wide(pending) || any_wide(wide)) {
    sha.update(&kWideMark, 1);
    sha.update(pending.data(), pending.size_bytes());
    update_as_u64(sha, narrow);
    sha.update(wide.data(), wide.size_bytes());
    return;
  }
  update_as_u32(sha, pending);
  sha.update(narrow.data(), narrow.size_bytes());
  update_as_u32(sha, wide);
}

}  // namespace

Digest sha256(std::span<const std::uint8_t> bytes) noexcept {
  Digest out;
  Sha256{}.update(bytes.data(), bytes.size()).finish(out.data());
  return out;
}

void extend_chain(std::span<const std::uint8_t> previous, const Tokens& tokens, std::size_t block,
                  std::span<const Extra> extras, std::span<std::uint8_t> out) noexcept {
  const std::size_t links = out.size() / kDigestBytes;
  assert(block > 0 && tokens.size() / block >= links);
  auto extra = extras.begin();
  for (std::size_t i = 0; i < links; ++i) {
    std::uint8_t* link = out.data() + i * kDigestBytes;
    Sha256 sha;
    sha.update(previous.data(), previous.size());
    update_block(sha, tokens, i * block, block);
    sha.finish(link);
    if (extra != extras.end() && extra->link == i) {
      Digest plain;
      std::memcpy(plain.data(), link, kDigestBytes);
      Sha256{}
          .update(kExtraTag, kExtraTagBytes)
          .update(plain.data(), kDigestBytes)
          .update(extra->digest, kDigestBytes)
          .finish(link);
      ++extra;
    }
    previous = {link, kDigestBytes};
  }
}

}  // namespace ucm::hash
