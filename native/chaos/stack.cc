#include "stack.h"

#include "ucm/staging_tier.h"
#include "worker.h"

namespace ucm::chaos {

using namespace std::chrono_literals;

PosixOptions posix_options(const Plan& plan, std::uint32_t shape,
                           std::shared_ptr<IoFaults> faults) {
  PosixOptions o;
  o.roots = {plan.root};
  o.namespace_dir = shape == 0 ? "ns-a" : "ns-b";
  o.namespace_digest.fill(static_cast<std::uint8_t>(shape + 1));
  // Rings cost more to set up than a worker lives; the disk rounds have them.
  o.engine = plan.disk ? "auto" : "psync";
  o.read_threads = 1;
  o.depth = 4;
  o.probe_interval = 50ms;
  o.gc.capacity_bytes = plan.collect ? 40 * 36 * 1024 : 0;
  o.gc.interval = 200ms;
  o.gc.lease_ttl = 1s;
  o.faults = std::move(faults);
  if (plan.slab) {
    o.layout = "slab";
    o.gc.capacity_bytes = 4 << 20;
    o.shm_directory = plan.index;
    o.quarantine = 1s;
    o.lease_ttl = 1s;
  }
  return o;
}

CacheOptions cache_options(const Plan& plan) {
  CacheOptions o;
  o.name = "chaos";
  o.directory = plan.shm;
  o.namespace_digest.fill(9);
  o.capacity_bytes = kCacheBytes;
  o.capacity_explicit = true;
  o.load_reserve = 8;
  o.load_reserve_explicit = true;
  o.quarantine = 1s;
  o.touch_threads = 1;
  return o;
}

Stack::Stack(const Plan& plan, std::uint32_t shape, std::shared_ptr<IoFaults> faults) {
  posix = make_posix_stage(geometry_of(shape), posix_options(plan, shape, std::move(faults)));
  if (plan.cache) {
    tier = open_cache(geometry_of(shape), cache_options(plan));
  } else {
    tier = std::make_shared<StagingTier>(geometry_of(shape), 4, 8);
  }
  StoreOptions options;
  options.timeout = std::chrono::milliseconds(kTaskTimeoutMs);
  options.retry_delay = 2ms;
  store = std::make_unique<Store>(posix, tier, host_device(), options);
}

Stack::~Stack() {
  if (store) (void)store->close(5s);
}

}  // namespace ucm::chaos
