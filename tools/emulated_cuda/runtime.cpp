// A CUDA runtime over host memory: allocates, copies, keeps the order of streams and events, records graphs. Launched kernels do nothing.
//
// Kernels of torch run at once, on the thread that calls them (kernels.cpp), after what their stream waits for. Copies on streams other
// than the default, and NCCL, run on a thread of their stream, so a wait that is missing shows as values of before; EMULATED_CUDA_LAG_US
// makes each of them late.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>
#undef cudaGetDeviceProperties
#define X extern "C" __attribute__((visibility("default")))
static std::mutex mu;
struct Block {
  size_t size;
  int dev;
  int kind;
}; // kind 1 device, 2 host pinned
static std::map<uintptr_t, Block> blocks;
static size_t used[64];
static thread_local int cur = 0;
static thread_local cudaError_t last = cudaSuccess;
static int ndev() {
  const char *e = getenv("EMULATED_CUDA_DEVICES");
  static int n = e ? atoi(e) : 1;
  return n;
}
static size_t cap() {
  const char *e = getenv("EMULATED_CUDA_GB");
  static size_t n = (size_t)((e ? atof(e) : 80.0) * (1ull << 30));
  return n;
}
static size_t bigcopy() {
  const char *e = getenv("EMULATED_CUDA_COPY_MAX");
  static size_t n = e ? strtoull(e, 0, 10) : getenv("EMULATED_CUDA_SIZES_ONLY") ? 6 << 20 : ~0ull;
  return n;
}

extern "C" {
__attribute__((visibility("default"))) std::atomic<long long> emulated_counts[16];
}
enum { LAUNCH, H2D, D2H, D2D, H2DB, D2HB, D2DB, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE, SYNC_COPY, MALLOCS, WAITS, RECORDS, GRAPHS, MEMSET };
static std::unordered_map<const void *, std::string> names;
static std::unordered_map<std::string, long long> launches;
static bool naming() {
  static bool n = getenv("EMULATED_CUDA_NAMES") != nullptr;
  return n;
}
static cudaError_t ret(cudaError_t e) {
  if (e) last = e;
  return e;
}
static Block *find(const void *p, uintptr_t *base = nullptr) {
  auto it = blocks.upper_bound((uintptr_t)p);
  if (it == blocks.begin()) return nullptr;
  --it;
  if ((uintptr_t)p < it->first + it->second.size) {
    if (base) *base = it->first;
    return &it->second;
  }
  return nullptr;
}
static void trace(const char *what, const void *a, const void *b, long long n) {
  static FILE *f = getenv("EMULATED_CUDA_TRACE")
                       ? fopen((std::string(getenv("EMULATED_CUDA_TRACE")) + "." + std::to_string(getpid())).c_str(), "w")
                       : nullptr;
  if (f) {
    std::lock_guard<std::mutex> g(mu);
    fprintf(f, "%s %p %p %lld\n", what, a, b, n);
  }
}
#include <unistd.h>
X void **__cudaRegisterFatBinary(void *) {
  static void *h[4];
  return h;
}
X void __cudaRegisterFatBinaryEnd(void **) {}
X void __cudaUnregisterFatBinary(void **) {}
X void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *, void *, int *) {
  if (naming()) names[host] = name;
}
X void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
X char __cudaInitModule(void **) { return 1; }
struct Config {
  dim3 g, b;
  size_t s;
  cudaStream_t st;
};
static thread_local std::vector<Config> configs;
X unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, cudaStream_t st) {
  configs.push_back({g, b, s, st});
  return 0;
}
X cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *st) {
  if (configs.empty()) return ret(cudaErrorMissingConfiguration);
  auto c = configs.back();
  configs.pop_back();
  *g = c.g;
  *b = c.b;
  *s = c.s;
  *(cudaStream_t *)st = c.st;
  return cudaSuccess;
}
struct GraphS {
  std::vector<std::function<void()>> todo;
};
static std::vector<std::function<void()>> recording;
X bool emulated_graph_add(std::function<void()> f) {
  recording.push_back(std::move(f));
  return true;
}
struct Ticket {
  std::atomic<bool> done{false};
};
using Tickets = std::vector<std::shared_ptr<Ticket>>;
static void wait_for(const Tickets &ts) {
  for (auto &t : ts) {
    int k = 0;
    while (!t->done)
      if (++k < 50)
        sched_yield();
      else
        usleep(20);
  }
}
static bool all_done(const Tickets &ts) {
  for (auto &t : ts)
    if (!t->done) return false;
  return true;
}
static int lag() {
  static int l = getenv("EMULATED_CUDA_LAG_US") ? atoi(getenv("EMULATED_CUDA_LAG_US")) : 0;
  return l;
}
struct StreamS {
  int dev;
  unsigned flags;
  int prio;
  bool capturing;
  unsigned long long id;
  std::mutex m;
  Tickets pending;
  std::thread *worker;
  std::mutex qm;
  std::condition_variable cv;
  struct Todo {
    Tickets deps;
    std::function<void()> f;
    std::shared_ptr<Ticket> t;
  };
  std::deque<Todo> q;
  StreamS(int d, unsigned f, int p) : dev(d), flags(f), prio(p), capturing(false), id(0), worker(nullptr) {}
  void settle() {
    Tickets ts;
    {
      std::lock_guard<std::mutex> l(m);
      ts = pending;
    }
    wait_for(ts);
    std::lock_guard<std::mutex> l(m);
    Tickets left;
    for (auto &t : pending)
      if (!t->done) left.push_back(t);
    pending = left;
  }
  void async(std::function<void()> f) {
    auto t = std::make_shared<Ticket>();
    Todo todo;
    {
      std::lock_guard<std::mutex> l(m);
      todo.deps = pending;
      pending = {t};
    }
    todo.f = f;
    todo.t = t;
    std::lock_guard<std::mutex> l(qm);
    q.push_back(todo);
    if (!worker) {
      worker = new std::thread([this] {
        for (;;) {
          Todo x;
          {
            std::unique_lock<std::mutex> l(qm);
            cv.wait(l, [this] { return !q.empty(); });
            x = q.front();
            q.pop_front();
          }
          wait_for(x.deps);
          if (lag()) usleep(lag());
          x.f();
          x.t->done = true;
        }
      });
      worker->detach();
    }
    cv.notify_one();
  }
};
struct EventS {
  int dev;
  unsigned flags;
  double t;
  bool recorded;
  Tickets tickets;
};
static std::vector<StreamS *> streams_;
static StreamS *at(cudaStream_t s) {
  static StreamS *defaults[64];
  if ((uintptr_t)s > 16) return (StreamS *)s;
  std::lock_guard<std::mutex> l(mu);
  if (!defaults[cur]) {
    defaults[cur] = new StreamS(cur, 0, 0);
    streams_.push_back(defaults[cur]);
  }
  return defaults[cur];
}
X void emulated_settle(cudaStream_t s) { at(s)->settle(); }
X void emulated_async(cudaStream_t s, std::function<void()> f) { at(s)->async(f); }
static void settle_all(int dev) {
  std::vector<StreamS *> all;
  {
    std::lock_guard<std::mutex> l(mu);
    all = streams_;
  }
  for (auto s : all)
    if (s->dev == dev) s->settle();
}
static thread_local cudaError_t pendingerr;
static bool capturing(cudaStream_t s) { return s && (uintptr_t)s > 16 && ((StreamS *)s)->capturing; }
static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static cudaError_t launch(const void *f, dim3 g, dim3 b, cudaStream_t s) {
  emulated_counts[LAUNCH]++;
  if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z || g.y > 65535 || g.z > 65535 || g.x > 2147483647u || (size_t)b.x * b.y * b.z > 1024) {
    fprintf(stderr, "emulated CUDA: bad launch grid %u %u %u block %u %u %u\n", g.x, g.y, g.z, b.x, b.y, b.z);
    return ret(cudaErrorInvalidConfiguration);
  }
  if (s && (uintptr_t)s > 16 && ((StreamS *)s)->dev != cur) {
    fprintf(stderr, "emulated CUDA: launch on a stream of device %d with current device %d\n", ((StreamS *)s)->dev, cur);
    return ret(cudaErrorInvalidResourceHandle);
  }
  if (naming()) {
    std::lock_guard<std::mutex> l(mu);
    auto it = names.find(f);
    launches[it == names.end() ? "?" : it->second]++;
  }
  at(s)->settle();
  trace("launch", s, f, 0);
  return cudaSuccess;
}
X cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **, size_t, cudaStream_t s) { return launch(f, g, b, s); }
X cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **, size_t, cudaStream_t s) {
  return launch((const void *)f, g, b, s);
}
X cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
X cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **, size_t, cudaStream_t s) { return launch(f, g, b, s); }
X cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **) {
  return launch(f, c->gridDim, c->blockDim, c->stream);
}
X void emulated_dump(const char *path) {
  FILE *f = fopen(path, "w");
  for (auto &k : launches) fprintf(f, "%lld %s\n", k.second, k.first.c_str());
  fclose(f);
}
X cudaError_t cudaDeviceCanAccessPeer(int *a, int, int) {
  *a = 0;
  return cudaSuccess;
}
X cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return ret(cudaErrorPeerAccessUnsupported); }
static int attr(int a) {
  switch (a) {
  case cudaDevAttrMaxThreadsPerBlock:
    return 1024;
  case cudaDevAttrMaxBlockDimX:
  case cudaDevAttrMaxBlockDimY:
    return 1024;
  case cudaDevAttrMaxBlockDimZ:
    return 64;
  case cudaDevAttrMaxGridDimX:
    return 2147483647;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ:
    return 65535;
  case cudaDevAttrMaxSharedMemoryPerBlock:
    return 49152;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    return 232448;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    return 233472;
  case cudaDevAttrWarpSize:
    return 32;
  case cudaDevAttrMultiProcessorCount:
    return 132;
  case cudaDevAttrComputeCapabilityMajor:
    return 9;
  case cudaDevAttrComputeCapabilityMinor:
    return 0;
  case cudaDevAttrMaxRegistersPerBlock:
  case cudaDevAttrMaxRegistersPerMultiprocessor:
    return 65536;
  case cudaDevAttrMaxThreadsPerMultiProcessor:
    return 2048;
  case cudaDevAttrClockRate:
    return 1980000;
  case cudaDevAttrMemoryClockRate:
    return 2619000;
  case cudaDevAttrGlobalMemoryBusWidth:
    return 5120;
  case cudaDevAttrL2CacheSize:
    return 60 << 20;
  case cudaDevAttrUnifiedAddressing:
  case cudaDevAttrConcurrentKernels:
  case cudaDevAttrCooperativeLaunch:
  case cudaDevAttrCanMapHostMemory:
    return 1;
  case cudaDevAttrTextureAlignment:
    return 512;
  default:
    return 0;
  }
}
X cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int) {
  *v = attr(a);
  return cudaSuccess;
}
X cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Emulated H200");
  p->totalGlobalMem = cap();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->l2CacheSize = 60 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448;
  p->canMapHostMemory = 1;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->pciBusID = d + 1;
  p->memoryBusWidth = 5120;
  p->maxBlocksPerMultiProcessor = 32;
  p->cooperativeLaunch = 1;
  p->textureAlignment = 512;
  p->uuid.bytes[0] = (char)d;
  return cudaSuccess;
}
X cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int) {
  *p = (cudaMemPool_t)8;
  return cudaSuccess;
}
X cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", d + 1);
  return cudaSuccess;
}
X cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) {
  if (a) *a = 0;
  if (b) *b = -5;
  return cudaSuccess;
}
X cudaError_t cudaDeviceSynchronize() {
  emulated_counts[SYNC_DEVICE]++;
  settle_all(cur);
  return cudaSuccess;
}
X cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
X cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
X cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
  *e = (cudaEvent_t) new EventS{cur, f, 0, false, {}};
  return cudaSuccess;
}
X cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
X cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (EventS *)e;
  return cudaSuccess;
}
X cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  auto x = (EventS *)a, y = (EventS *)b;
  if ((x->flags | y->flags) & cudaEventDisableTiming || !x->recorded || !y->recorded) return ret(cudaErrorInvalidResourceHandle);
  *ms = (float)(y->t - x->t);
  return cudaSuccess;
}
X cudaError_t cudaEventQuery(cudaEvent_t e) { return all_done(((EventS *)e)->tickets) ? cudaSuccess : ret(cudaErrorNotReady); }
X cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  emulated_counts[RECORDS]++;
  auto x = (EventS *)e;
  int dev = (uintptr_t)s > 16 ? ((StreamS *)s)->dev : cur;
  if (x->dev != dev) {
    fprintf(stderr, "emulated CUDA: event of device %d recorded on a stream of device %d\n", x->dev, dev);
    return ret(cudaErrorInvalidResourceHandle);
  }
  x->t = now();
  x->recorded = true;
  {
    auto y = at(s);
    std::lock_guard<std::mutex> l(y->m);
    x->tickets = y->pending;
  }
  trace("record", s, e, 0);
  return cudaSuccess;
}
X cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
X cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  wait_for(((EventS *)e)->tickets);
  emulated_counts[SYNC_EVENT]++;
  trace("esync", 0, e, 0);
  return cudaSuccess;
}
extern "C" __attribute__((visibility("default"))) size_t emulated_copy_max() { return bigcopy(); }
static void *grab(size_t n) {
  n = (n + 4095) & ~4095ull;
  void *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
X cudaError_t cudaMalloc(void **p, size_t n) {
  std::lock_guard<std::mutex> l(mu);
  emulated_counts[MALLOCS]++;
  if (!n) {
    *p = 0;
    return cudaSuccess;
  }
  if (used[cur] + n > cap()) return ret(cudaErrorMemoryAllocation);
  *p = grab(n);
  if (!*p) return ret(cudaErrorMemoryAllocation);
  used[cur] += n;
  blocks[(uintptr_t)*p] = {n, cur, 1};
  return cudaSuccess;
}
X cudaError_t cudaFree(void *p) {
  if (!p) return cudaSuccess;
  settle_all(cur);
  std::lock_guard<std::mutex> l(mu);
  auto it = blocks.find((uintptr_t)p);
  if (it == blocks.end() || it->second.kind != 1) return ret(cudaErrorInvalidValue);
  used[it->second.dev] -= it->second.size;
  munmap(p, (it->second.size + 4095) & ~4095ull);
  blocks.erase(it);
  return cudaSuccess;
}
X cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
X cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return cudaFree(p); }
X cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) {
  *p = grab(n);
  std::lock_guard<std::mutex> l(mu);
  blocks[(uintptr_t)*p] = {n, cur, 2};
  return *p ? cudaSuccess : ret(cudaErrorMemoryAllocation);
}
X cudaError_t cudaFreeHost(void *p) {
  if (!p) return cudaSuccess;
  std::lock_guard<std::mutex> l(mu);
  auto it = blocks.find((uintptr_t)p);
  if (it == blocks.end()) return ret(cudaErrorInvalidValue);
  munmap(p, (it->second.size + 4095) & ~4095ull);
  blocks.erase(it);
  return cudaSuccess;
}
X cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned) {
  *d = h;
  return cudaSuccess;
}
X cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
  std::lock_guard<std::mutex> l(mu);
  auto it = blocks.lower_bound((uintptr_t)p);
  if (find(p) || (it != blocks.end() && it->first < (uintptr_t)p + n)) return ret(cudaErrorHostMemoryAlreadyRegistered);
  blocks[(uintptr_t)p] = {n, cur, 3};
  return cudaSuccess;
}
X cudaError_t cudaHostUnregister(void *p) {
  std::lock_guard<std::mutex> l(mu);
  auto it = blocks.find((uintptr_t)p);
  if (it == blocks.end() || it->second.kind != 3) return ret(cudaErrorHostMemoryNotRegistered);
  blocks.erase(it);
  return cudaSuccess;
}
X cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
  *t = cap();
  *f = cap() - used[cur];
  return cudaSuccess;
}
X cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
  std::lock_guard<std::mutex> l(mu);
  memset(a, 0, sizeof *a);
  auto b = find(p);
  if (!b) {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    a->hostPointer = (void *)p;
    return cudaSuccess;
  }
  a->device = b->dev;
  a->type = b->kind == 1 ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  a->devicePointer = (void *)p;
  a->hostPointer = b->kind == 1 ? 0 : (void *)p;
  return cudaSuccess;
}
static int kindof(const void *p) {
  std::lock_guard<std::mutex> l(mu);
  auto b = find(p);
  return b ? b->kind : 0;
}
static void inside(const void *p, size_t n, const char *w) {
  std::lock_guard<std::mutex> l(mu);
  uintptr_t base;
  auto b = find(p, &base);
  if (b && (uintptr_t)p + n > base + b->size) {
    fprintf(stderr, "emulated CUDA: copy past the end of a block (%s)\n", w);
    abort();
  }
}
static cudaError_t copy(void *d, const void *s, size_t n, cudaStream_t st, bool async) {
  int kd = kindof(d), ks = kindof(s);
  inside(d, n, "to");
  inside(s, n, "from");
  int which = kd == 1 ? (ks == 1 ? D2D : H2D) : D2H;
  emulated_counts[which]++;
  emulated_counts[which + 3] += n;
  bool pageable = (kd == 0 || ks == 0);
  if (!async || pageable) emulated_counts[SYNC_COPY]++;
  if (capturing(st) && pageable) return ret(cudaErrorStreamCaptureUnsupported);
  if (capturing(st)) {
    emulated_graph_add([=] { memmove(d, s, n); });
    return cudaSuccess;
  }
  if (async && !pageable && (uintptr_t)st > 16) {
    if (n <= bigcopy()) at(st)->async([=] { memmove(d, s, n); });
    return cudaSuccess;
  }
  at(st)->settle();
  if (n <= bigcopy()) memmove(d, s, n);
  trace(which == H2D ? "h2d" : which == D2H ? "d2h" : "d2d", st, d, n);
  return cudaSuccess;
}
X cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind, cudaStream_t st) { return copy(d, s, n, st, true); }
X cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind) { return copy(d, s, n, 0, false); }
X cudaError_t cudaMemcpyPeerAsync(void *d, int, const void *s, int, size_t n, cudaStream_t st) { return copy(d, s, n, st, true); }
X cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t st) {
  for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (const char *)s + i * sp, w);
  emulated_counts[D2D]++;
  return cudaSuccess;
}
X cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
X cudaError_t cudaMemset(void *d, int v, size_t n) {
  emulated_counts[MEMSET]++;
  if (n <= bigcopy()) memset(d, v, n);
  return cudaSuccess;
}
X cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t st) {
  if (capturing(st)) {
    emulated_graph_add([=] { memset(d, v, n); });
    return cudaSuccess;
  }
  at(st)->settle();
  return cudaMemset(d, v, n);
}
X cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *v) {
  memset(v, 0, 8);
  return cudaSuccess;
}
X cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) { return cudaSuccess; }
X cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
X cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
X cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->maxDynamicSharedSizeBytes = 232448;
  a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
X cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
X cudaError_t cudaGetDevice(int *d) {
  *d = cur;
  return cudaSuccess;
}
X cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= ndev()) return ret(cudaErrorInvalidDevice);
  cur = d;
  return cudaSuccess;
}
X cudaError_t cudaGetDeviceCount(int *n) {
  *n = ndev();
  return *n ? cudaSuccess : cudaErrorNoDevice;
}
X const char *cudaGetErrorName(cudaError_t) { return "emulated error"; }
X const char *cudaGetErrorString(cudaError_t e) {
  static thread_local char s[64];
  if (e == cudaErrorMemoryAllocation) return "out of memory";
  snprintf(s, 64, "emulated error %d", (int)e);
  return s;
}
X cudaError_t cudaGetLastError() {
  auto e = last;
  last = cudaSuccess;
  return e;
}
X cudaError_t cudaPeekAtLastError() { return last; }
X cudaError_t cudaGetSymbolAddress(void **p, const void *) {
  static char space[1 << 20];
  *p = space;
  return cudaSuccess;
}
X cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  if ((uintptr_t)s <= 16) return ret(cudaErrorStreamCaptureUnsupported);
  recording.clear();
  ((StreamS *)s)->capturing = true;
  ((StreamS *)s)->id = ++emulated_counts[GRAPHS];
  return cudaSuccess;
}
X cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  ((StreamS *)s)->capturing = false;
  *g = (cudaGraph_t) new GraphS{std::move(recording)};
  recording.clear();
  return cudaSuccess;
}
X cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus *st, unsigned long long *id, cudaGraph_t *g,
                                       const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  bool c = capturing(s);
  *st = c ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = c ? ((StreamS *)s)->id : 0;
  if (g) *g = 0;
  if (d) *d = 0;
  if (e) *e = 0;
  if (n) *n = 0;
  return cudaSuccess;
}
X cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *st) {
  *st = capturing(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
X cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *m) {
  static thread_local cudaStreamCaptureMode k = cudaStreamCaptureModeGlobal;
  auto o = k;
  k = *m;
  *m = o;
  return cudaSuccess;
}
X cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char *, unsigned) { return cudaSuccess; }
X cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
X cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
X cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *n, size_t *c) {
  *c = 1;
  if (n) n[0] = (cudaGraphNode_t)1;
  return cudaSuccess;
}
X cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *n) {
  *n = 0;
  return cudaSuccess;
}
X cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long) {
  *e = (cudaGraphExec_t) new GraphS(*(GraphS *)g);
  return cudaSuccess;
}
X cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long) {
  *e = (cudaGraphExec_t) new GraphS(*(GraphS *)g);
  return cudaSuccess;
}
X cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  at(s)->settle();
  emulated_counts[LAUNCH]++;
  for (auto &f : ((GraphS *)e)->todo) f();
  return cudaSuccess;
}
X cudaError_t cudaIpcCloseMemHandle(void *) { return cudaSuccess; }
X cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *, cudaEvent_t) { return ret(cudaErrorNotSupported); }
X cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *) { return ret(cudaErrorNotSupported); }
X cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *, cudaIpcEventHandle_t) { return ret(cudaErrorNotSupported); }
X cudaError_t cudaIpcOpenMemHandle(void **, cudaIpcMemHandle_t, unsigned) { return ret(cudaErrorNotSupported); }
X cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *d) {
  at(s)->settle();
  f(d);
  return cudaSuccess;
}
X cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *d, unsigned) {
  at(s)->settle();
  f(s, cudaSuccess, d);
  return cudaSuccess;
}
X cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
X cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
X cudaError_t cudaProfilerStart() { return cudaSuccess; }
X cudaError_t cudaProfilerStop() { return cudaSuccess; }
X cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  auto n = new StreamS(cur, f, p);
  {
    std::lock_guard<std::mutex> l(mu);
    streams_.push_back(n);
  }
  *s = (cudaStream_t)n;
  trace("stream", *s, 0, p);
  return cudaSuccess;
}
X cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
X cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
X cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
X cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
  *p = (uintptr_t)s > 16 ? ((StreamS *)s)->prio : 0;
  return cudaSuccess;
}
X cudaError_t cudaStreamQuery(cudaStream_t s) {
  auto x = at(s);
  std::lock_guard<std::mutex> l(x->m);
  return all_done(x->pending) ? cudaSuccess : ret(cudaErrorNotReady);
}
X cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  emulated_counts[SYNC_STREAM]++;
  if (capturing(s)) return ret(cudaErrorStreamCaptureUnsupported);
  at(s)->settle();
  trace("sync", s, 0, 0);
  return cudaSuccess;
}
X cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  {
    auto x = at(s);
    std::lock_guard<std::mutex> l(x->m);
    for (auto &t : ((EventS *)e)->tickets)
      if (!t->done) x->pending.push_back(t);
  }
  emulated_counts[WAITS]++;
  trace("wait", s, e, 0);
  return cudaSuccess;
}
X cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned, unsigned long long,
                                               cudaDriverEntryPointQueryResult *r) {
  static void *h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void *p = h ? dlsym(h, name) : nullptr;
  if (!p && h) p = dlsym(h, (std::string(name) + "_v2").c_str());
  *f = p;
  if (r) *r = p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!p && getenv("EMULATED_CUDA_VERBOSE")) fprintf(stderr, "emulated CUDA: no driver function %s\n", name);
  return p ? cudaSuccess : ret(cudaErrorSymbolNotFound);
}
