// A process that works with a store until somebody kills it.
#pragma once

#include "board.h"
#include "plan.h"
#include "settings.h"

namespace ucm::chaos {

/// No wait of a store may be longer; its own tasks end after kTaskTimeoutMs.
inline constexpr std::int64_t kWaitBoundMs = 10'000;
inline constexpr std::int64_t kTaskTimeoutMs = 3'000;

/// Runs in a forked child; returns its exit status (0: in order). `index` is its place on the board;
/// worker 0 is the inspector of its round.
int run_worker(const Plan& plan, Board& board, std::uint32_t index, std::uint64_t seed,
               const Settings& settings);

/// Opens the segment once, as a process of its own that comes late; 0: attached or refused in words.
int run_visitor(const Plan& plan);

}  // namespace ucm::chaos
