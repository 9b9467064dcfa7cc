// Layout `file`: one file per object, placed by its id, collected by age.
#include <fcntl.h>
#include <sys/stat.h>

#include "posix/collector.h"
#include "posix/housekeeper.h"
#include "posix/lookup.h"
#include "posix/object_layout.h"
#include "posix/read_worker.h"
#include "posix/write_worker.h"

namespace ucm::posix {
namespace {

class FileLayout final : public ObjectLayout {
 public:
  explicit FileLayout(std::shared_ptr<Core> core) : core_(std::move(core)) {
    for (const auto& root : core_->roots) refuse_slab(*root);
    core_->housekeeper = std::make_unique<Housekeeper>(core_, core_->options);
    core_->collector = std::make_unique<Collector>(core_, core_->options);
    lookup_ = std::make_unique<Lookup>(core_);
  }

  std::size_t root_of(const ReadOp& op) noexcept override { return core_->place(op.id); }
  std::size_t root_of(const WriteOp& op) noexcept override { return core_->place(op.id); }

  std::shared_ptr<Worker> make_reader(std::size_t root, EngineKind kind, std::uint32_t depth,
                                      ReadQueue& queue) override {
    return std::make_shared<ReadWorker>(core_, *core_->roots[root], kind, depth, queue);
  }
  std::shared_ptr<Worker> make_writer(std::size_t root, EngineKind kind, std::uint32_t depth,
                                      WriteQueue& queue) override {
    return std::make_shared<WriteWorker>(core_, *core_->roots[root], kind, depth, queue);
  }

  bool keep_packed() noexcept override { return core_->format.keep_packed(); }
  void start() override { core_->collector->start(*core_); }
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override {
    lookup_->run(ids, present, stop_at_first_miss);
  }
  void touch(std::span<const BlockId> ids) noexcept override { core_->housekeeper->touch(ids); }
  void remove(std::span<const BlockId> ids) noexcept override { core_->housekeeper->remove(ids); }
  bool collect_now(std::chrono::milliseconds timeout) override {
    return core_->collector->collect_now(timeout);
  }
  std::string trouble() const override { return core_->collector->trouble(); }

  void describe(std::map<std::string, std::string>& facts) const override {
    facts["layout"] = "file";
    facts["fsync"] = core_->options.fsync ? "before rename" : "off";
    facts["gc"] = core_->options.gc.enabled ? settings_text(core_->options.gc) : "no part";
  }

  std::size_t stop(Deadline grace) noexcept override {
    std::size_t left = 0;
    if (!core_->collector->stop(grace)) ++left;
    if (!core_->housekeeper->stop(grace)) ++left;
    if (!lookup_->stop(grace)) ++left;
    return left;
  }

 private:
  static void refuse_slab(const Root& root) {
    struct stat st {};
    const auto ns = root.ns_dir();
    // Only looked at: opening and closing it would drop the locks of a slab stage of this process.
    if (!ns || fstatat(ns->get(), kSlabManifest.data(), &st, AT_SYMLINK_NOFOLLOW) < 0) return;
    throw PosixSetupError("posix: " + root.full_path("") +
                              " holds the layout slab, configured is posix_layout file; "
                              "set posix_layout: slab, or name another directory or namespace",
                          0);
  }

  const std::shared_ptr<Core> core_;
  std::unique_ptr<Lookup> lookup_;
};

}  // namespace

std::shared_ptr<ObjectLayout> make_file_layout(std::shared_ptr<Core> core) {
  return std::make_shared<FileLayout>(std::move(core));
}

}  // namespace ucm::posix
