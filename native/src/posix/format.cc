#include "posix/format.h"

#define XXH_INLINE_ALL
#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <limits>

#include "chaos/hooks.h"
#include "posix/fd.h"
#include "ucm/posix.h"

namespace ucm::posix {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

std::uint64_t hash(const void* data, std::size_t n) noexcept { return XXH3_64bits(data, n); }

std::size_t tail_bytes_of(const Geometry& g) noexcept {
  return std::size_t{8} * g.shard_count + g.layout.size();
}

std::uint64_t fixed_check(const FixedHeader& h) noexcept {
  return hash(&h, offsetof(FixedHeader, fixed_check));
}

}  // namespace

Format::Format(const Geometry& geometry, const std::array<std::uint8_t, 32>& namespace_digest)
    : geometry_(geometry), namespace_digest_(namespace_digest), foreign_(geometry) {
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
  const std::uint64_t tail = tail_bytes_of(geometry);
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

std::uint64_t Format::stamp(std::byte* header, std::uint64_t generation) noexcept {
  FixedHeader h;
  std::memcpy(&h, header, sizeof h);
  h.generation = generation;
  h.fixed_check = fixed_check(h);
  std::memcpy(header, &h, sizeof h);
  return h.fixed_check;
}

std::uint64_t Format::generation(const std::byte* header) noexcept {
  FixedHeader h;
  std::memcpy(&h, header, sizeof h);
  return h.generation;
}

bool Format::blank(const std::byte* header) noexcept {
  const FixedHeader none{};
  return std::memcmp(header, static_cast<const void*>(&none), sizeof none) == 0;
}

const ForeignLayout* Format::foreign(std::string_view text, std::uint32_t shard_count,
                                     std::uint64_t shard_bytes) const {
  const std::size_t header =
      align_up(sizeof(FixedHeader) + std::size_t{8} * shard_count + text.size(), kIoAlign);
  // Longer headers are not looked into (judge_foreign).
  if (header != kIoAlign) return nullptr;
  return foreign_.find(text, shard_count, shard_bytes, header);
}

Verdict Format::judge(const BlockId& id, const std::byte* first, std::uint64_t actual_bytes,
                      const ForeignLayout*& foreign) const noexcept {
  FixedHeader h;
  std::memcpy(&h, first, sizeof h);
  if (h.magic != kMagic || h.fixed_check != fixed_check(h)) return Verdict::kBad;
  // A sound header that does not describe this very file: truncated, grown, renamed or copied here.
  if (h.file_bytes != actual_bytes || h.id != id) {
    return Verdict::kBad;
  }
  if (h.version != kFormatVersion || h.namespace_digest != namespace_digest_) {
    return Verdict::kForeign;
  }
  if (h.shard_count != geometry_.shard_count || h.shard_bytes != geometry_.shard_bytes ||
      h.layout_bytes != geometry_.layout.size() || h.layout_hash != layout_hash_ ||
      h.header_bytes != header_bytes_) {
    return judge_foreign(h, first, foreign);
  }
  return h.file_bytes == file_bytes_ ? Verdict::kOurs : Verdict::kBad;
}

Verdict Format::judge_foreign(const FixedHeader& h, const std::byte* first,
                              const ForeignLayout*& foreign) const noexcept {
  const std::uint64_t text_at = sizeof(FixedHeader) + std::uint64_t{8} * h.shard_count;
  if (h.header_bytes != kIoAlign || text_at + h.layout_bytes > kIoAlign) return Verdict::kForeign;
  const auto* text = reinterpret_cast<const char*>(first) + text_at;
  if (hash(text, h.layout_bytes) != h.layout_hash) return Verdict::kBad;
  try {
    foreign = foreign_.find({text, h.layout_bytes}, h.shard_count, h.shard_bytes, h.header_bytes);
  } catch (...) {  // no memory to plan with: a miss
    foreign = nullptr;
  }
  if (foreign == nullptr) return Verdict::kForeign;
  return h.file_bytes == foreign->file_bytes ? Verdict::kConvertible : Verdict::kBad;
}

Verdict Format::judge_size(std::uint64_t actual_bytes) const noexcept {
  if (actual_bytes == file_bytes_) return Verdict::kOurs;
  if (!foreign_.plausible(actual_bytes)) return Verdict::kBad;
  return foreign_.known_size(actual_bytes) ? Verdict::kConvertible : Verdict::kForeign;
}

bool Format::tail_sound(const Geometry& geometry, const std::byte* header) noexcept {
  FixedHeader h;
  std::memcpy(&h, header, sizeof h);
  return h.tail_check == hash(header + sizeof(FixedHeader), tail_bytes_of(geometry));
}

bool Format::shards_sound(const Geometry& geometry, const std::byte* header, const std::byte* data,
                          std::uint32_t begin, std::uint32_t end) noexcept {
  if (UCM_CHAOS_BUG(kNoChecksum)) return true;
  const std::byte* table = header + sizeof(FixedHeader);
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint64_t want;
    std::memcpy(&want, table + std::size_t{8} * i, sizeof want);
    if (hash(data + geometry.shard_offset(i), geometry.shard_bytes) != want) return false;
  }
  return true;
}

Verdict ask_header(const Format& format, int dirfd, const BlockId& id, const ObjectPath& path,
                   std::uint64_t bytes) noexcept {
  const Fd fd(openat(dirfd, path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  alignas(8) std::byte first[kIoAlign];
  const ForeignLayout* foreign = nullptr;
  if (!fd || pread(fd.get(), first, sizeof first, 0) != static_cast<ssize_t>(sizeof first)) {
    return Verdict::kBad;
  }
  return format.judge(id, first, bytes, foreign);
}

}  // namespace ucm::posix
