// Rounds of a campaign and what they add up to.
#pragma once

#include <array>
#include <chrono>

#include "board.h"
#include "plan.h"

namespace ucm::chaos {

/// Deaths of all rounds, by cause; points are told by name in the table.
struct Tally {
  std::uint64_t kills_by_time = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(Point::kCount)> kills_by_point{};
  std::uint64_t rounds = 0, cache_rounds = 0, disk_rounds = 0, full_rounds = 0, slab_rounds = 0;
  std::uint64_t all_at_once = 0, aliens = 0, header_flips = 0;
  std::string no_mount;  ///< why no small file system could be mounted here

  [[nodiscard]] std::uint64_t kills() const noexcept {
    std::uint64_t n = kills_by_time;
    for (const auto k : kills_by_point) n += k;
    return n;
  }
};

/// Shared memory for a board, made before anything is forked. Throws std::bad_alloc.
[[nodiscard]] Board& make_board();

/// One round of at least `kills` deaths (fewer once something was found). Called in a process with one
/// thread; leaves no process and no file behind.
void run_round(const Plan& plan, Board& board, Tally& tally, unsigned kills);

/// Several processes wait for the same reads while those who look without being woken look seldom: every
/// wait must end by a wake-up.
void run_wake_round(const Plan& plan, Board& board);

/// A directory that goes with its owner, in its own mount namespace a small file system if asked.
class Place {
 public:
  explicit Place(const std::string& base);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// tmpfs of that size on it; false with errno where this process may not mount.
  bool mount_small(std::uint64_t kib, std::uint64_t inodes);

 private:
  std::string path_;
  bool mounted_ = false;
};

}  // namespace ucm::chaos
