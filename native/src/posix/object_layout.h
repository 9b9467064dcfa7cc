// What differs between the two layouts of the stage: where objects are and how they get there.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "posix/core.h"
#include "posix/queue.h"
#include "posix/read_item.h"
#include "posix/worker.h"
#include "posix/write_item.h"

namespace ucm::posix {

/// Thread-safe after start(). The stage owns queues and threads; a layout makes the workers.
class ObjectLayout {
 public:
  static constexpr std::size_t kNowhere = SIZE_MAX;

  virtual ~ObjectLayout() = default;

  /// Index of the root that serves the operation; kNowhere: it can be answered as a miss at once.
  [[nodiscard]] virtual std::size_t root_of(const ReadOp& op) noexcept = 0;
  /// kNowhere: no root takes writes.
  [[nodiscard]] virtual std::size_t root_of(const WriteOp& op) noexcept = 0;

  [[nodiscard]] virtual std::shared_ptr<Worker> make_reader(std::size_t root, EngineKind kind,
                                                            std::uint32_t depth,
                                                            ReadQueue& queue) = 0;
  [[nodiscard]] virtual std::shared_ptr<Worker> make_writer(std::size_t root, EngineKind kind,
                                                            std::uint32_t depth,
                                                            WriteQueue& queue) = 0;

  /// Stage::keep_packed. Where every object has the same room there is nothing to gain.
  virtual bool keep_packed() noexcept { return false; }
  /// Last step of the stage's set-up. Throws PosixSetupError.
  virtual void start() = 0;
  virtual void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                      bool stop_at_first_miss) noexcept = 0;
  virtual void touch(std::span<const BlockId> ids) noexcept = 0;
  virtual void remove(std::span<const BlockId> ids) noexcept = 0;
  virtual bool collect_now(std::chrono::milliseconds timeout) = 0;
  /// Several times a second, on the stage's watch thread; never touches the medium.
  virtual void tick(Clock::time_point now) noexcept { (void)now; }
  /// Empty, or what health() says of it.
  [[nodiscard]] virtual std::string trouble() const { return {}; }
  virtual void describe(std::map<std::string, std::string>& facts) const = 0;
  virtual void add_stats(std::map<std::string, std::uint64_t>& stats) const { (void)stats; }
  /// Ends its own threads, once the workers are gone; returns how many were left behind.
  virtual std::size_t stop(Deadline grace) noexcept = 0;
};

/// One file per object.
[[nodiscard]] std::shared_ptr<ObjectLayout> make_file_layout(std::shared_ptr<Core> core);

}  // namespace ucm::posix
