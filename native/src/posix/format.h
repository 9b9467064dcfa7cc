// The bytes of an object's file. Little-endian, every offset a multiple of kIoAlign.
//
//   [0, header_bytes)  fixed part (128 bytes), a checksum per shard, the layout descriptor, zeros
//   header_bytes + Geometry::shard_offset(i)  shard i, shard_bytes long; what lies between two shards
//                                             is padding and means nothing
//
// A packed object (version 2, written for a stage above that packs shards) has one table more between
// checksums and descriptor: the packed bytes of each shard, 0 for one that is not packed. Its data are
// the shards one after the other, each padded with zeros to kIoAlign; checksums are of what is stored.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "posix/foreign.h"
#include "posix/names.h"
#include "ucm/block_id.h"
#include "ucm/geometry.h"

namespace ucm::posix {

inline constexpr std::array<char, 8> kMagic{'U', 'C', 'M', 'F', 'I', 'L', 'E', '\n'};
inline constexpr std::uint32_t kFormatVersion = 1;
inline constexpr std::uint32_t kPackedVersion = 2;
/// Shards of an object that may be packed: each is one piece of a vectored transfer (IOV_MAX).
inline constexpr std::uint32_t kMaxPackedShards = 1000;

/// First bytes of every file. `fixed_check` covers all before it; `tail_check` covers the shard
/// checksums and the layout text, so that the first 4,096 bytes tell what any file is.
struct FixedHeader {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint64_t file_bytes;
  std::uint64_t shard_bytes;
  std::uint32_t shard_count;
  std::uint32_t layout_bytes;
  BlockId id;
  std::array<std::uint8_t, 32> namespace_digest;
  std::uint64_t layout_hash;
  std::uint64_t tail_check;
  std::uint64_t generation;  ///< layout slab: of the slot; else 0
  std::array<std::uint8_t, 8> reserved;
  std::uint64_t fixed_check;
};
static_assert(sizeof(FixedHeader) == 128);

/// What a file's header says about it, for one reader.
enum class Verdict : std::uint8_t {
  kOurs,         ///< this object, this geometry, this layout
  kPacked,       ///< the same, packed, and such objects were asked for
  kConvertible,  ///< this object in a layout that can be turned into ours
  kForeign,      ///< a sound file of another namespace, geometry, layout or version: leave it
  kBad,          ///< contradicts itself, its name or its size: remove it
};

/// Encodes and checks headers for one geometry and namespace. Thread-safe.
class Format {
 public:
  /// Throws PosixSetupError when the geometry is empty or too large.
  Format(const Geometry& geometry, const std::array<std::uint8_t, 32>& namespace_digest);

  [[nodiscard]] const Geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::size_t header_bytes() const noexcept { return header_bytes_; }
  [[nodiscard]] std::size_t packed_header_bytes() const noexcept { return packed_header_bytes_; }
  [[nodiscard]] std::uint64_t file_bytes() const noexcept { return file_bytes_; }
  [[nodiscard]] std::uint64_t shard_file_offset(std::uint32_t shard) const noexcept {
    return header_bytes_ + geometry_.shard_offset(shard);
  }

  /// From now on packed objects count as ours. False: there are too many shards.
  bool keep_packed() noexcept;

  /// Bytes that shard `i` of a packed object takes in its file.
  [[nodiscard]] std::uint64_t packed_room(std::uint64_t packed) const noexcept {
    return packed == 0 ? geometry_.shard_stride() : align_up(packed, kIoAlign);
  }

  /// Fills `header` (packed_header_bytes(), or header_bytes() when `packed` is null) for the object
  /// whose data region is `data`; hashes all of it. Returns the bytes of the file.
  std::uint64_t encode(const BlockId& id, const std::byte* data, const std::uint64_t* packed,
                       std::byte* header) const noexcept;

  /// Of an encoded header: sets the slot's generation. Returns the header's check.
  static std::uint64_t stamp(std::byte* header, std::uint64_t generation) noexcept;
  [[nodiscard]] static std::uint64_t generation(const std::byte* header) noexcept;
  /// Nothing was ever written there, or somebody has emptied it.
  [[nodiscard]] static bool blank(const std::byte* header) noexcept;
  [[nodiscard]] std::uint64_t layout_hash() const noexcept { return layout_hash_; }
  [[nodiscard]] const std::array<std::uint8_t, 32>& namespace_digest() const noexcept {
    return namespace_digest_;
  }

  /// The way from objects of that shape and layout text into ours, or null.
  [[nodiscard]] const ForeignLayout* foreign(std::string_view text, std::uint32_t shard_count,
                                             std::uint64_t shard_bytes) const;

  /// Judges the first kIoAlign bytes of a file of `actual_bytes`. Sets `foreign` when the verdict is
  /// kConvertible; a foreign header longer than kIoAlign is not looked into (kForeign).
  [[nodiscard]] Verdict judge(const BlockId& id, const std::byte* first, std::uint64_t actual_bytes,
                              const ForeignLayout*& foreign) const noexcept;

  /// May a file of this size hold a stored object? kOurs, kPacked: yes, as far as a size tells;
  /// kConvertible: like others found before; kForeign: its header has to be asked; kBad: no.
  [[nodiscard]] Verdict judge_size(std::uint64_t actual_bytes) const noexcept;

  /// Of a whole header of `geometry`: are checksums and layout text intact?
  [[nodiscard]] static bool tail_sound(const Geometry& geometry, const std::byte* header) noexcept;

  /// Do shards [begin, end) of `data`, an object of `geometry`, match the checksums in `header`?
  [[nodiscard]] static bool shards_sound(const Geometry& geometry, const std::byte* header,
                                         const std::byte* data, std::uint32_t begin,
                                         std::uint32_t end) noexcept;

  /// Of the whole header of a packed object in a file of `file_bytes`: intact, and the table describes
  /// this file?
  [[nodiscard]] bool packed_sound(const std::byte* header, std::uint64_t file_bytes) const noexcept;
  /// Table entry of a shard.
  [[nodiscard]] std::uint64_t packed_bytes(const std::byte* header,
                                           std::uint32_t shard) const noexcept;
  /// Do the stored bytes of shards [begin, end), each at its place in `data`, match their checksums?
  [[nodiscard]] bool packed_shards_sound(const std::byte* header, const std::byte* data,
                                         std::uint32_t begin, std::uint32_t end) const noexcept;

 private:
  [[nodiscard]] Verdict judge_foreign(const FixedHeader& h, const std::byte* first,
                                      const ForeignLayout*& foreign) const noexcept;

  const Geometry geometry_;
  const std::array<std::uint8_t, 32> namespace_digest_;
  std::uint64_t layout_hash_ = 0;
  std::size_t tail_bytes_ = 0;
  std::size_t header_bytes_ = 0;
  std::size_t packed_header_bytes_ = 0;
  std::uint64_t file_bytes_ = 0;
  std::atomic<bool> keeps_packed_{false};
  mutable ForeignLayouts foreign_;
};

/// The verdict on the file of `bytes` at `path` below `dirfd`, by its header. Blocks; kBad when it
/// cannot be read.
[[nodiscard]] Verdict ask_header(const Format& format, int dirfd, const BlockId& id,
                                 const ObjectPath& path, std::uint64_t bytes) noexcept;

}  // namespace ucm::posix
