#include "posix/format.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <limits>

#include "ucm/posix.h"

namespace ucm::posix {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

std::uint64_t hash(const void* data, std::size_t n) noexcept { return XXH3_64bits(data, n); }

std::uint64_t fixed_check(const FixedHeader& h) noexcept {
  return hash(&h, offsetof(FixedHeader, fixed_check));
}

}  // namespace

Format::Format(const Geometry& geometry, const std::array<std::uint8_t, 32>& namespace_digest)
    : geometry_(geometry), namespace_digest_(namespace_digest) {
  constexpr std::uint64_t kMaxObject = std::uint64_t{1} << 40;
  constexpr std::uint64_t kMaxHeader = std::uint64_t{1} << 24;
  if (geometry.shard_count == 0 || geometry.shard_bytes == 0) {
    throw PosixSetupError("posix: geometry has no shards or empty shards (shard_count=" +
                              std::to_string(geometry.shard_count) +
                              ", shard_bytes=" + std::to_string(geometry.shard_bytes) + ")",
                          0);
  }
  if (geometry.shard_bytes > kMaxObject / geometry.shard_count - kIoAlign) {
    throw PosixSetupError(
        "posix: an object of more than 1 TiB cannot be stored; use smaller blocks", 0);
  }
  layout_hash_ = hash(geometry.layout.data(), geometry.layout.size());
  const std::uint64_t tail = std::uint64_t{8} * geometry.shard_count + geometry.layout.size();
  if (tail > kMaxHeader) {
    throw PosixSetupError("posix: shard table and layout descriptor exceed 16 MiB", 0);
  }
  tail_bytes_ = tail;
  header_bytes_ = align_up(sizeof(FixedHeader) + tail, kIoAlign);
  file_bytes_ = header_bytes_ + geometry.object_bytes();
}

void Format::encode(const BlockId& id, const std::byte* data, std::byte* header) const noexcept {
  std::byte* tail = header + sizeof(FixedHeader);
  for (std::uint32_t i = 0; i < geometry_.shard_count; ++i) {
    const std::uint64_t check = hash(data + geometry_.shard_offset(i), geometry_.shard_bytes);
    std::memcpy(tail + std::size_t{8} * i, &check, sizeof check);
  }
  std::memcpy(tail + std::size_t{8} * geometry_.shard_count, geometry_.layout.data(),
              geometry_.layout.size());
  std::memset(tail + tail_bytes_, 0, header_bytes_ - sizeof(FixedHeader) - tail_bytes_);
  FixedHeader h{};
  h.magic = kMagic;
  h.version = kFormatVersion;
  h.header_bytes = static_cast<std::uint32_t>(header_bytes_);
  h.file_bytes = file_bytes_;
  h.shard_bytes = geometry_.shard_bytes;
  h.shard_count = geometry_.shard_count;
  h.layout_bytes = static_cast<std::uint32_t>(geometry_.layout.size());
  h.id = id;
  h.namespace_digest = namespace_digest_;
  h.layout_hash = layout_hash_;
  h.tail_check = hash(tail, tail_bytes_);
  h.fixed_check = fixed_check(h);
  std::memcpy(header, &h, sizeof h);
}

Verdict Format::judge(const BlockId& id, const std::byte* first,
                      std::uint64_t actual_bytes) const noexcept {
  FixedHeader h;
  std::memcpy(&h, first, sizeof h);
  if (h.magic != kMagic || h.fixed_check != fixed_check(h)) return Verdict::kBad;
  // A sound header that does not describe this very file: truncated, grown, renamed or copied here.
  if (h.file_bytes != actual_bytes || h.id != id) {
    return Verdict::kBad;
  }
  if (h.version != kFormatVersion || h.namespace_digest != namespace_digest_ ||
      h.shard_count != geometry_.shard_count || h.shard_bytes != geometry_.shard_bytes ||
      h.layout_bytes != geometry_.layout.size() || h.layout_hash != layout_hash_ ||
      h.header_bytes != header_bytes_) {
    return Verdict::kForeign;
  }
  return h.file_bytes == file_bytes_ ? Verdict::kOurs : Verdict::kBad;
}

bool Format::tail_sound(const std::byte* header) const noexcept {
  FixedHeader h;
  std::memcpy(&h, header, sizeof h);
  return h.tail_check == hash(header + sizeof(FixedHeader), tail_bytes_);
}

bool Format::shards_sound(const std::byte* header, const std::byte* data, std::uint32_t begin,
                          std::uint32_t end) const noexcept {
  const std::byte* table = header + sizeof(FixedHeader);
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint64_t want;
    std::memcpy(&want, table + std::size_t{8} * i, sizeof want);
    if (hash(data + geometry_.shard_offset(i), geometry_.shard_bytes) != want) return false;
  }
  return true;
}

}  // namespace ucm::posix
