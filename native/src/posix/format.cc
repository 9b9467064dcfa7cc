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
  packed_header_bytes_ =
      align_up(sizeof(FixedHeader) + tail + std::size_t{8} * geometry.shard_count, kIoAlign);
}

bool Format::keep_packed() noexcept {
  if (geometry_.shard_count > kMaxPackedShards) return false;
  keeps_packed_.store(true);
  return true;
}

std::uint64_t Format::encode(const BlockId& id, const std::byte* data, const std::uint64_t* packed,
                             std::byte* header) const noexcept {
  const std::size_t table = std::size_t{8} * geometry_.shard_count;
  const std::size_t header_size = packed == nullptr ? header_bytes_ : packed_header_bytes_;
  const std::size_t tail_size = packed == nullptr ? tail_bytes_ : tail_bytes_ + table;
  std::uint64_t file_size = packed == nullptr ? file_bytes_ : packed_header_bytes_;
  std::byte* tail = header + sizeof(FixedHeader);
  for (std::uint32_t i = 0; i < geometry_.shard_count; ++i) {
    const std::uint64_t stored = packed == nullptr ? 0 : packed[i];
    const std::uint64_t check =
        hash(data + geometry_.shard_offset(i), stored == 0 ? geometry_.shard_bytes : stored);
    std::memcpy(tail + std::size_t{8} * i, &check, sizeof check);
    if (packed != nullptr) file_size += packed_room(stored);
  }
  std::byte* text = tail + table;
  if (packed != nullptr) {
    std::memcpy(text, packed, table);
    text += table;
  }
  std::memcpy(text, geometry_.layout.data(), geometry_.layout.size());
  std::memset(tail + tail_size, 0, header_size - sizeof(FixedHeader) - tail_size);
  FixedHeader h{};
  h.magic = kMagic;
  h.version = packed == nullptr ? kFormatVersion : kPackedVersion;
  h.header_bytes = static_cast<std::uint32_t>(header_size);
  h.file_bytes = file_size;
  h.shard_bytes = geometry_.shard_bytes;
  h.shard_count = geometry_.shard_count;
  h.layout_bytes = static_cast<std::uint32_t>(geometry_.layout.size());
  h.id = id;
  h.namespace_digest = namespace_digest_;
  h.layout_hash = layout_hash_;
  h.tail_check = hash(tail, tail_size);
  h.fixed_check = fixed_check(h);
  std::memcpy(header, &h, sizeof h);
  return file_size;
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
  if (h.namespace_digest != namespace_digest_) return Verdict::kForeign;
  if (h.version == kPackedVersion) {
    const bool ours =
        keeps_packed_.load(std::memory_order_relaxed) && h.shard_count == geometry_.shard_count &&
        h.shard_bytes == geometry_.shard_bytes && h.layout_bytes == geometry_.layout.size() &&
        h.layout_hash == layout_hash_ && h.header_bytes == packed_header_bytes_;
    return ours ? Verdict::kPacked : Verdict::kForeign;
  }
  if (h.version != kFormatVersion) return Verdict::kForeign;
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
  const bool packed = keeps_packed_.load(std::memory_order_relaxed) &&
                      actual_bytes % kIoAlign == 0 && actual_bytes > packed_header_bytes_ &&
                      actual_bytes < packed_header_bytes_ + geometry_.object_bytes();
  if (!foreign_.plausible(actual_bytes)) return packed ? Verdict::kPacked : Verdict::kBad;
  return foreign_.known_size(actual_bytes) && !packed ? Verdict::kConvertible : Verdict::kForeign;
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

std::uint64_t Format::packed_bytes(const std::byte* header, std::uint32_t shard) const noexcept {
  std::uint64_t out;
  std::memcpy(&out, header + sizeof(FixedHeader) + std::size_t{8} * (geometry_.shard_count + shard),
              sizeof out);
  return out;
}

bool Format::packed_sound(const std::byte* header, std::uint64_t file_bytes) const noexcept {
  FixedHeader h;
  std::memcpy(&h, header, sizeof h);
  const std::size_t tail_size = tail_bytes_ + std::size_t{8} * geometry_.shard_count;
  if (h.tail_check != hash(header + sizeof(FixedHeader), tail_size)) return false;
  std::uint64_t bytes = packed_header_bytes_;
  for (std::uint32_t i = 0; i < geometry_.shard_count; ++i) {
    const std::uint64_t stored = packed_bytes(header, i);
    if (stored > geometry_.packed_limit()) return false;
    bytes += packed_room(stored);
  }
  return bytes == file_bytes;
}

bool Format::packed_shards_sound(const std::byte* header, const std::byte* data,
                                 std::uint32_t begin, std::uint32_t end) const noexcept {
  const std::byte* table = header + sizeof(FixedHeader);
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint64_t want;
    std::memcpy(&want, table + std::size_t{8} * i, sizeof want);
    const std::uint64_t stored = packed_bytes(header, i);
    const std::uint64_t bytes = stored == 0 ? geometry_.shard_bytes : stored;
    if (hash(data + geometry_.shard_offset(i), bytes) != want) return false;
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
