// Buffers for objects of other layouts on their way into ours: bounded, shared by all read threads.
//
// The shards of one object may be asked for by several operations. The first of them reads the whole
// object; those that come meanwhile leave their operation with it, and those that come soon after
// find the bytes still there: an object is read once, not once per shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "posix/read_item.h"
#include "ucm/block_id.h"

namespace ucm::posix {

/// One file, as long as it is the same file: a replaced one is another.
struct FileVersion {
  BlockId id{};
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t mtime_ns = 0;
  friend bool operator==(const FileVersion&, const FileVersion&) = default;
};

/// Thread-safe. Memory is taken with the first object of another layout and kept until the end.
class ScratchPool {
 public:
  static constexpr std::uint64_t kBytes = 64u << 20;
  static constexpr std::size_t kMaxBuffers = 16;

  /// One object in a buffer. `data` may be used by who holds it (owner, or until let_go()).
  struct Buffer {
    std::byte* data = nullptr;

   private:
    friend class ScratchPool;
    enum class State : std::uint8_t { kEmpty, kReading, kVerified, kLost };
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, std::free};
    std::uint64_t bytes = 0;
    FileVersion file;
    std::vector<ReadItem> waiting;
    std::uint64_t last_use = 0;
    std::size_t holders = 0;
    State state = State::kEmpty;
  };

  enum class Claim : std::uint8_t {
    kOwner,     ///< read the whole object into the buffer, then finish() or fail()
    kVerified,  ///< the object is there: use it, then let_go()
    kJoined,    ///< another operation reads it and answers for this one: the item was taken
    kNoBuffer,  ///< all buffers are in use: ask again
    kNoMemory,  ///< the system has no memory for a buffer
  };

  /// `object_bytes` of the usual object decides how many buffers there are, at least two.
  explicit ScratchPool(std::uint64_t object_bytes);
  ~ScratchPool();
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  /// Find or take the buffer of `file`, an object of `bytes`.
  Claim claim(const FileVersion& file, std::uint64_t bytes, ReadItem& item,
              Buffer*& buffer) noexcept;

  /// The owner has read and verified: operations that joined, to be served from the buffer. Call
  /// until it returns none; the last call makes the object free for others to use or to displace.
  [[nodiscard]] std::vector<ReadItem> finish(Buffer& buffer) noexcept;
  /// The owner could not: all that joined, to be answered as the owner's own operation is.
  [[nodiscard]] std::vector<ReadItem> fail(Buffer& buffer) noexcept;
  void let_go(Buffer& buffer) noexcept;
  /// The kernel may still write into it: its memory is never used nor freed again.
  void lose(Buffer& buffer) noexcept;

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::uint64_t clock_ = 0;
};

}  // namespace ucm::posix
