// Shared pieces of the limits program: the meter, the arguments of one command, one result line.
#pragma once

#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace ucm::bench {

/// What one repetition cost. CPU seconds are of every thread of the process, kernel time included.
struct Cost {
  double wall_s = 0;
  double cpu_s = 0;
};

/// Measures from construction to stop(). Set up everything before and check results after it.
class Meter {
 public:
  Meter() noexcept : cpu_(cpu_now()), wall_(std::chrono::steady_clock::now()) {}

  [[nodiscard]] Cost stop() const noexcept {
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - wall_;
    return {wall.count(), cpu_now() - cpu_};
  }

 private:
  static double cpu_now() noexcept {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
  }

  double cpu_;
  std::chrono::steady_clock::time_point wall_;
};

/// `key=value` arguments of one command. A missing or malformed one throws with its name.
class Args {
 public:
  /// Parses the words after the command; values hold no blanks.
  explicit Args(const std::string& text);

  [[nodiscard]] std::string text(const std::string& key) const;
  [[nodiscard]] std::uint64_t number(const std::string& key) const;

 private:
  std::map<std::string, std::string> values_;
};

/// What a command reports: its cost, how many operations and how many bytes it moved.
struct Report {
  Cost cost;
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;
};

/// The commands. Each runs one repetition; the caller interleaves and repeats. See README.md of
/// benchmarks/ for the arguments. They throw std::runtime_error with the reason.
Report copy_limit(const Args& args);
Report read_one_file(const Args& args);
Report write_one_file(const Args& args);
Report read_files(const Args& args);
Report write_files(const Args& args);
Report stat_files(const Args& args);
Report hash_chain(const Args& args);
Report pack_shards(const Args& args);

}  // namespace ucm::bench
