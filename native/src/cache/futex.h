// Process-shared futexes and the monotonic clock shared by all processes of a node.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ucm::cache {

/// Sleep while `word` is `expected`, at most `timeout`. Spurious returns are normal.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds timeout) noexcept;
void futex_wake_one(std::atomic<std::uint32_t>& word) noexcept;
void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept;

/// Seconds of CLOCK_MONOTONIC, rounded down; never 0.
[[nodiscard]] std::uint32_t monotonic_seconds() noexcept;

}  // namespace ucm::cache
