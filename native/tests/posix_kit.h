// Shared by the tests of the Posix stage: directories, buffers, waiting sinks, raw access to files.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ucm/posix.h"

namespace ucm::posix_test {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// A directory that goes with the test. On the disk below TMPDIR by default, or on shared memory.
class TempDir {
 public:
  explicit TempDir(const std::string& base = "");
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] const fs::path& path() const { return path_; }
  [[nodiscard]] std::string str() const { return path_.string(); }

 private:
  fs::path path_;
};

inline Geometry small_geometry(std::uint32_t shards = 4, std::uint64_t shard_bytes = 8192) {
  Geometry g;
  g.shard_count = shards;
  g.shard_bytes = shard_bytes;
  g.runs = {{shard_bytes, 1, 0}};
  g.layout = "test-layout kv=2 tokens=64";
  return g;
}

inline PosixOptions options_for(const std::vector<std::string>& roots) {
  PosixOptions o;
  o.roots = roots;
  o.namespace_dir = "ns-test";
  o.namespace_digest.fill(7);
  return o;
}

/// The n-th id of a test; spread over all fan-out directories.
BlockId id_of(std::uint64_t n);

/// An aligned data region filled by a pattern that only this id has.
class Region {
 public:
  explicit Region(const Geometry& g);
  Region(const Geometry& g, const BlockId& id) : Region(g) { fill(id); }
  void fill(const BlockId& id);
  /// Are shards [begin, end) exactly those of `id`?
  [[nodiscard]] bool holds(const BlockId& id, std::uint32_t begin, std::uint32_t end) const;
  [[nodiscard]] bool holds(const BlockId& id) const { return holds(id, 0, g_.shard_count); }
  [[nodiscard]] std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  Geometry g_;
  std::unique_ptr<std::byte, Free> data_;
};

/// Collects results by cookie; every one must come exactly once.
class Results : public ReadSink, public WriteSink {
 public:
  explicit Results(std::size_t expected) : expected_(expected), outcomes_(expected) {}
  void on_read(std::uint64_t cookie, std::uint32_t, std::uint32_t, Outcome o) noexcept override {
    put(cookie, o);
  }
  void on_written(std::uint64_t cookie, Outcome o) noexcept override { put(cookie, o); }
  [[nodiscard]] bool wait(milliseconds timeout = milliseconds(20'000));
  [[nodiscard]] Outcome at(std::size_t i) const;
  [[nodiscard]] std::size_t count(Status s) const;

 private:
  void put(std::uint64_t cookie, Outcome o) noexcept;
  const std::size_t expected_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::vector<Outcome> outcomes_;
  std::size_t arrived_ = 0;
};

inline Deadline in(milliseconds t) { return Clock::now() + t; }

/// One stage under test with the blocking calls that tests want.
class Harness {
 public:
  explicit Harness(const Geometry& g, PosixOptions o)
      : geometry(g), stage(make_posix_stage(g, o)) {}
  explicit Harness(PosixOptions o) : Harness(small_geometry(), std::move(o)) {}

  Outcome write(const BlockId& id, milliseconds timeout = milliseconds(20'000));
  Outcome read(const BlockId& id, Region& into, milliseconds timeout = milliseconds(20'000));
  /// Reads and checks the bytes when the outcome is kOk.
  Outcome read(const BlockId& id);
  bool present(const BlockId& id);
  std::uint64_t stat(const std::string& name) { return stage->stats().at(name); }

  Geometry geometry;
  std::shared_ptr<PosixStage> stage;
};

/// Where the object lies; `root` is the only one.
fs::path object_path(const fs::path& root, const BlockId& id, const std::string& ns = "ns-test");
std::size_t count_files(const fs::path& root, const std::function<bool(const std::string&)>& match);
/// Temporaries of writers anywhere below.
std::size_t count_temps(const fs::path& root);
void flip_byte(const fs::path& file, std::uint64_t offset);
/// True once `condition` holds; polls up to `timeout`.
bool eventually(const std::function<bool()>& condition,
                milliseconds timeout = milliseconds(10'000));

/// A fault plan from a function.
class Faults : public IoFaults {
 public:
  using Fn = std::function<int(IoStep, const std::string&, std::size_t&)>;
  explicit Faults(Fn fn) : fn_(std::move(fn)) {}
  int before(IoStep step, const char* path, std::size_t& bytes) noexcept override {
    return fn_(step, path ? path : "", bytes);
  }

 private:
  Fn fn_;
};

}  // namespace ucm::posix_test
