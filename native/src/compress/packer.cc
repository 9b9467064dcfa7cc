#include "compress/packer.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "compress/planes.h"

namespace ucm::compress {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::uint32_t kMaxWidth = 8;
/// A plane that did not shrink is tried again after so many chunks.
constexpr std::uint32_t kRetryChunks = 8;

std::uint64_t chunks_of(std::uint64_t bytes) noexcept {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

/// Less than this much saved is not worth the work of getting it back.
std::uint64_t worth(std::uint64_t bytes) noexcept { return bytes - bytes / 32; }

}  // namespace

Packer::Packer(std::uint64_t shard_bytes, std::uint64_t limit, CodecKind kind, int level,
               std::uint32_t width)
    : shard_bytes_(shard_bytes),
      limit_(limit),
      width_(width),
      codec_(kind, level),
      planes_(new std::byte[kChunkBytes]),
      copy_(new std::byte[std::max<std::uint64_t>(limit, 1)]) {}

std::uint64_t Packer::pack(const std::byte* shard, std::byte* to) noexcept {
  const std::uint64_t chunks = chunks_of(shard_bytes_);
  const std::uint64_t table_end = sizeof(PackedHeader) + 4 * chunks * width_;
  const std::uint64_t goal = std::min(limit_, worth(shard_bytes_));
  if (codec_.kind() == CodecKind::kNone || table_end >= goal) return 0;
  std::array<std::uint32_t, kMaxWidth> skip{};
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  std::uint64_t at = table_end;
  for (std::uint64_t c = 0; c < chunks; ++c) {
    const std::uint64_t begin = c * kChunkBytes;
    const std::size_t bytes = std::min<std::uint64_t>(kChunkBytes, shard_bytes_ - begin);
    split_planes(shard + begin, bytes, width_, planes_.get());
    XXH3_64bits_update(&hash, shard + begin, bytes);
    const std::byte* plane = planes_.get();
    for (std::uint32_t p = 0; p < width_; ++p) {
      const std::size_t n = plane_bytes(bytes, width_, p);
      std::uint32_t stored = 0;
      if (skip[p] > 0) {
        --skip[p];
      } else {
        const std::uint64_t room = std::min(goal - at, worth(n));
        stored = static_cast<std::uint32_t>(codec_.compress(plane, n, to + at, room));
        if (stored == 0) skip[p] = kRetryChunks - 1;
      }
      std::uint32_t entry = stored;
      if (stored == 0) {
        if (goal - at < n) return 0;
        std::memcpy(to + at, plane, n);
        entry = static_cast<std::uint32_t>(n) | kPlain;
      }
      std::memcpy(to + sizeof(PackedHeader) + 4 * (c * width_ + p), &entry, sizeof entry);
      at += entry & ~kPlain;
      plane += n;
    }
    // Noise shows early: the rest of it need not be tried.
    if (c == 1 && chunks > 4 && at - table_end > worth(begin + bytes)) return 0;
  }
  const PackedHeader h{kPackedMagic,
                       kPackedShardVersion,
                       static_cast<std::uint8_t>(codec_.kind()),
                       static_cast<std::uint8_t>(width_),
                       0,
                       shard_bytes_,
                       XXH3_64bits_digest(&hash),
                       kChunkBytes,
                       static_cast<std::uint32_t>(chunks)};
  std::memcpy(to, &h, sizeof h);
  return at;
}

Unpacked Packer::unpack(std::byte* place, std::uint64_t packed) noexcept {
  PackedHeader h;
  if (packed < sizeof h || packed > limit_) return Unpacked::kDamaged;
  std::memcpy(&h, place, sizeof h);
  if (h.magic != kPackedMagic) return Unpacked::kDamaged;
  const bool width_known = h.width == 1 || h.width == 2 || h.width == 4 || h.width == 8;
  if (h.version != kPackedShardVersion || h.raw_bytes != shard_bytes_ || !width_known ||
      h.chunk_bytes != kChunkBytes || h.chunks != chunks_of(shard_bytes_) ||
      (h.codec != static_cast<std::uint8_t>(CodecKind::kZstd) &&
       h.codec != static_cast<std::uint8_t>(CodecKind::kLz4))) {
    return Unpacked::kUnknown;
  }
  std::memcpy(copy_.get(), place, packed);
  return unpack_chunks(h, place, packed);
}

Unpacked Packer::unpack_chunks(const PackedHeader& h, std::byte* to,
                               std::uint64_t packed) noexcept {
  const std::byte* const from = copy_.get();
  const auto kind = static_cast<CodecKind>(h.codec);
  std::uint64_t at = sizeof h + std::uint64_t{4} * h.chunks * h.width;
  if (at > packed) return Unpacked::kDamaged;
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  for (std::uint64_t c = 0; c < h.chunks; ++c) {
    const std::uint64_t begin = c * kChunkBytes;
    const std::size_t bytes = std::min<std::uint64_t>(kChunkBytes, shard_bytes_ - begin);
    std::array<const std::byte*, kMaxWidth> planes{};
    std::byte* plane = planes_.get();
    for (std::uint32_t p = 0; p < h.width; ++p) {
      const std::size_t n = plane_bytes(bytes, h.width, p);
      std::uint32_t entry;
      std::memcpy(&entry, from + sizeof h + 4 * (c * h.width + p), sizeof entry);
      const std::uint32_t stored = entry & ~kPlain;
      if (stored > packed - at) return Unpacked::kDamaged;
      if ((entry & kPlain) != 0) {
        if (stored != n) return Unpacked::kDamaged;
        planes[p] = from + at;
      } else {
        if (!codec_.decompress(kind, from + at, stored, plane, n)) return Unpacked::kDamaged;
        planes[p] = plane;
      }
      at += stored;
      plane += n;
    }
    join_planes(planes.data(), bytes, h.width, to + begin);
    XXH3_64bits_update(&hash, to + begin, bytes);
  }
  return at == packed && XXH3_64bits_digest(&hash) == h.check ? Unpacked::kOk : Unpacked::kDamaged;
}

}  // namespace ucm::compress
