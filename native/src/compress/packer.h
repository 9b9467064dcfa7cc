// A packed shard: header, a length per plane of each chunk, the planes. Little-endian.
//
//   [0, 32)   PackedHeader
//   [32, ..)  u32 per chunk and plane: bytes of it, and kPlain set when they are not compressed
//   then      the planes in that order, without gaps
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "compress/codec.h"

namespace ucm::compress {

inline constexpr std::uint32_t kPackedMagic = 0x5A4D4355;  // "UCMZ"
inline constexpr std::uint8_t kPackedShardVersion = 1;
inline constexpr std::uint32_t kPlain = 0x8000'0000;
/// Two planes of it fit the second-level cache, with what they become.
inline constexpr std::uint32_t kChunkBytes = 256u << 10;

struct PackedHeader {
  std::uint32_t magic;
  std::uint8_t version;
  std::uint8_t codec;
  std::uint8_t width;
  std::uint8_t reserved;
  std::uint64_t raw_bytes;
  std::uint64_t check;  ///< XXH3 of the shard as it was
  std::uint32_t chunk_bytes;
  std::uint32_t chunks;
};
static_assert(sizeof(PackedHeader) == 32);

enum class Unpacked : std::uint8_t {
  kOk,
  kUnknown,  ///< sound, of another version or for another geometry: leave it
  kDamaged,
};

/// Packs and unpacks shards of one size; used by one thread. All memory is taken at construction.
class Packer {
 public:
  /// `limit`: the most bytes that a packed shard may have (less than `shard_bytes`). Throws
  /// std::bad_alloc.
  Packer(std::uint64_t shard_bytes, std::uint64_t limit, CodecKind kind, int level,
         std::uint32_t width);

  /// Returns the bytes written to `to` (room for `limit`), or 0: the shard is not worth it. What `to`
  /// holds then means nothing.
  [[nodiscard]] std::uint64_t pack(const std::byte* shard, std::byte* to) noexcept;

  /// `place` holds `packed` bytes; on kOk it holds the shard.
  [[nodiscard]] Unpacked unpack(std::byte* place, std::uint64_t packed) noexcept;

 private:
  [[nodiscard]] Unpacked unpack_chunks(const PackedHeader& h, std::byte* to,
                                       std::uint64_t packed) noexcept;

  const std::uint64_t shard_bytes_;
  const std::uint64_t limit_;
  const std::uint32_t width_;
  Codec codec_;
  std::unique_ptr<std::byte[]> planes_;  ///< kChunkBytes
  std::unique_ptr<std::byte[]> copy_;    ///< limit: what is unpacked over its own place
};

}  // namespace ucm::compress
