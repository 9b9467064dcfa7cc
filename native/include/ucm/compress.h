// The Compress stage: keeps shards shorter on the medium below, without losing a bit.
//
// A shard is cut into chunks, a chunk into one plane per byte of an element (all first bytes, all second
// bytes, ...), and each plane is compressed by itself: the exponents of KV repeat, the mantissas hardly do.
// A plane that does not shrink lies there as it is, a shard that does not either, so nothing ever takes
// more room than without this stage. Content and identity are unchanged: what was stored without the
// stage is read through it. Without the stage, packed objects are misses.
//
// Writes are packed into buffers of the stage, reads are unpacked in place in the buffer of the caller.
// Both run on `threads` threads of the stage, loads first. Steady work allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "ucm/stage.h"

namespace ucm {

enum class CodecKind : std::uint8_t {
  kNone = 0,  ///< store shards as they are; packed ones can still be read
  kZstd = 1,
  kLz4 = 2,
};

struct CompressOptions {
  CodecKind codec = CodecKind::kZstd;
  int level = 1;  ///< zstd: -7 (fastest) to 19; lz4: 1, or the negative acceleration
  std::uint32_t element_bytes = 0;  ///< 1, 2, 4 or 8 planes; 0: by the layout descriptor, else 2
  std::uint32_t threads = 0;        ///< 0: a quarter of the CPUs, 1 to 8
  std::uint64_t buffer_bytes = std::uint64_t{256}
                               << 20;  ///< for objects being written; at least two
};

/// The stage below or the options do not fit; the message says what to do.
class CompressSetupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Counters are those of the stage below and `compress_*`, `decompress_*`: see native/src/compress.
/// Throws CompressSetupError.
[[nodiscard]] std::shared_ptr<Stage> make_compress_stage(std::shared_ptr<Stage> below,
                                                         CompressOptions options);

}  // namespace ucm
