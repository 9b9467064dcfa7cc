#include "module.h"

NB_MODULE(_native, m) {
  m.doc() = "Native store and hashing of UCM (see native/include/ucm)";
  ucm::bindings::bind_hash(m);
  ucm::bindings::bind_layout(m);
  ucm::bindings::bind_stages(m);
  ucm::bindings::bind_device(m);
  ucm::bindings::bind_store(m);
  ucm::bindings::bind_posix(m);
  ucm::bindings::bind_cache(m);
  ucm::bindings::bind_compress(m);
}
