// The health wrapper: a stage that stands before another one and keeps the engine away from it while
// its medium does not work.
//
// One thread probes the medium every `interval` (Stage::probe, or a private object). The last `window`
// results count: `failures` bad ones open the guard, a window of good ones alone closes it. While it is
// open, new reads are misses, new writes are rejected (both with errno kOutOfService), lookups find
// nothing, and nothing reaches the stage but the probe and removals. Operations that were under way end
// as the stage ends them. No operation is retried, and a good probe proves the medium, not a hit.
//
// A probe that has not answered after `timeout` is a bad one, and so is every further `interval` of
// silence. That is worked out by whoever asks next, so a probe thread stuck in a hung mount stops
// neither the engine nor the opening of the guard. Shutdown leaves a stuck thread behind, with all that
// it uses.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "ucm/stage.h"

namespace ucm {

/// Time as the guard sees it; tests bring a clock of their own. Thread-safe.
class GuardClock {
 public:
  virtual ~GuardClock() = default;
  [[nodiscard]] virtual Clock::time_point now() const noexcept { return Clock::now(); }
  /// Sleep on `cv` until it is notified or `until` has come; may wake early.
  virtual void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& cv,
                    Clock::time_point until) {
    cv.wait_until(lock, until);
  }
};

struct GuardOptions {
  std::chrono::milliseconds interval{10'000};  ///< between the starts of two probes
  std::chrono::milliseconds timeout{3'000};    ///< a probe that takes longer has failed
  std::uint32_t window = 8;                    ///< results that count, 1 to 64
  std::uint32_t failures = 2;                  ///< bad ones among them that open the guard
  std::shared_ptr<GuardClock> clock;           ///< null: the steady clock
};

/// Counters are the stage's own and: `health_open` (0 or 1), `health_probes_total`,
/// `health_probe_failures_total`, `health_probes_skipped_total`, `health_opened_total`, `health_closed_total`,
/// `health_refused_{lookups,reads,writes}_total` (objects), `health_probe_stuck`.
class GuardStage final : public Stage {
 public:
  /// Starts the probe thread; the first probe comes after one interval (set-up has just tried the
  /// medium). Throws std::invalid_argument.
  GuardStage(std::shared_ptr<Stage> inner, GuardOptions options);
  ~GuardStage() override;  ///< shutdown within one second if that was not called
  GuardStage(const GuardStage&) = delete;
  GuardStage& operator=(const GuardStage&) = delete;

  const Geometry& geometry() const noexcept override;
  std::string name() const override;
  std::string identity() const override;
  bool keep_packed() noexcept override;
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override;
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline deadline) noexcept override;
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline deadline) noexcept override;
  void touch(std::span<const BlockId> ids) noexcept override;
  void remove(std::span<const BlockId> ids) noexcept override;
  std::map<std::string, std::uint64_t> stats() const override;
  std::string health() const override;
  void shutdown(Deadline deadline) noexcept override;

  /// New work is refused at this moment.
  [[nodiscard]] bool open() const noexcept;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace ucm
