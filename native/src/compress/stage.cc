// The stage's face: checks, passes on what it does not change.
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "compress/state.h"
#include "ucm/keep.h"
#include "ucm/layout.h"

namespace ucm {
namespace {

using compress::State;

std::uint32_t width_for(const CompressOptions& o, const Geometry& g) {
  const std::uint32_t asked = o.element_bytes;
  if (asked != 0) {
    if (asked == 1 || asked == 2 || asked == 4 || asked == 8) return asked;
    throw CompressSetupError("Compress: compress_element_bytes must be 1, 2, 4 or 8, got " +
                             std::to_string(asked));
  }
  std::string error;
  const auto layout = Layout::parse(g.layout, error);
  if (!layout || layout->opaque()) return 2;
  const std::uint64_t bytes = layout->item_bytes();
  return bytes == 1 || bytes == 4 || bytes == 8 ? static_cast<std::uint32_t>(bytes) : 2;
}

class CompressStage final : public Stage {
 public:
  CompressStage(std::shared_ptr<Stage> below, const CompressOptions& o, std::uint32_t width,
                std::uint32_t threads, std::size_t buffers)
      : state_(std::make_shared<State>(std::move(below), o, width, threads, buffers)),
        pid_(getpid()) {}

  ~CompressStage() override {
    if (getpid() != pid_) {
      keep_forever(state_);  // a forked child has none of its threads
      return;
    }
    shutdown(Clock::now() + std::chrono::seconds(1));
  }

  const Geometry& geometry() const noexcept override { return state_->below->geometry(); }
  std::string name() const override { return state_->below->name(); }
  std::string identity() const override { return state_->below->identity(); }

  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override {
    state_->below->lookup(ids, present, stop_at_first_miss);
  }

  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline deadline) noexcept override {
    if (getpid() != pid_) return state_->below->read(ops, std::move(sink), deadline);
    state_->read(ops, sink, deadline);
  }

  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline deadline) noexcept override {
    if (getpid() != pid_) return state_->below->write(ops, std::move(sink), deadline);
    state_->write(ops, sink, deadline);
  }

  void touch(std::span<const BlockId> ids) noexcept override { state_->below->touch(ids); }
  void remove(std::span<const BlockId> ids) noexcept override { state_->below->remove(ids); }
  std::optional<std::string> probe(Deadline deadline) override {
    return state_->below->probe(deadline);
  }

  std::map<std::string, std::uint64_t> stats() const override {
    auto out = state_->below->stats();
    state_->add_stats(out);
    return out;
  }

  std::string health() const override {
    std::string out = state_->below->health();
    if (const auto stuck = state_->stuck(); stuck > 0) {
      out += (out.empty() ? "" : "; ") + std::to_string(stuck) + " threads of Compress left behind";
    }
    return out;
  }

  void shutdown(Deadline deadline) noexcept override {
    if (getpid() == pid_) state_->shutdown(deadline);
  }

 private:
  const std::shared_ptr<State> state_;
  const pid_t pid_;
};

}  // namespace

std::shared_ptr<Stage> make_compress_stage(std::shared_ptr<Stage> below, CompressOptions options) {
  if (below == nullptr) throw CompressSetupError("Compress: needs a stage below it");
  const Geometry& g = below->geometry();
  if (g.shard_count == 0 || g.shard_bytes == 0) {
    throw CompressSetupError("Compress: the geometry has no shards or empty ones");
  }
  const std::uint32_t width = width_for(options, g);
  if (options.level < -7 || options.level > 19 || options.level == 0) {
    throw CompressSetupError("Compress: compress_level must be -7 to -1 or 1 to 19, got " +
                             std::to_string(options.level));
  }
  if (!below->keep_packed()) {
    throw CompressSetupError(
        "Compress: the stage below ('" + below->name() + "') does not keep objects of " +
        std::to_string(g.shard_count) +
        " shards shorter than they are; leave Compress out of the pipeline, or use layout 'file' "
        "and blocks of at most 1000 shards");
  }
  const std::uint32_t cpus = std::max(1u, std::thread::hardware_concurrency());
  const std::uint32_t threads =
      options.threads != 0 ? std::min(options.threads, 64u) : std::clamp(cpus / 4, 1u, 8u);
  const std::size_t buffers =
      std::clamp<std::uint64_t>(options.buffer_bytes / g.object_bytes(), 2, 4096);
  return std::make_shared<CompressStage>(std::move(below), options, width, threads, buffers);
}

}  // namespace ucm
