// NCCL between processes of one host, over shared memory. Operations of a communicator run in their order, on the thread of their stream.
// Ranks compare what they call: another operation, size or type is an error on all of them, where NCCL would wait or mix bytes.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <vector>
#define X extern "C" __attribute__((visibility("default")))
struct Id {
  char b[128];
};
struct Slot {
  long op, count, dtype, root, redop;
  double scale;
};
static const size_t DATA = 1 << 20;
struct Head {
  std::atomic<int> joined, arrived, sense, aborted;
  Slot slots[64];
};
struct Comm {
  int n, r;
  char *base;
  size_t size;
  std::string name;
  int sense;
  long sent[64], got[64];
  int splits;
  bool abort;
  int err;
  std::atomic<long> next, ended;
  Head *h() { return (Head *)base; }
  char *data(int i) { return base + 65536 + (size_t)i * DATA; }
};
static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
static double limit() {
  static double l = getenv("EMULATED_NCCL_LIMIT") ? atof(getenv("EMULATED_NCCL_LIMIT")) : 100;
  return l;
}
static bool wait(Comm *c, std::function<bool()> ok) {
  double end = now() + limit();
  long k = 0;
  while (!ok()) {
    if (c->abort || c->h()->aborted) return false;
    if (++k > 200)
      usleep(50);
    else
      sched_yield();
    if (now() > end) {
      fprintf(stderr, "emulated NCCL: rank %d of %d waited %.0f s\n", c->r, c->n, limit());
      return false;
    }
  }
  return true;
}
static bool barrier(Comm *c) {
  int s = c->sense ^= 1;
  auto h = c->h();
  if (h->arrived.fetch_add(1) == c->n - 1) {
    h->arrived = 0;
    h->sense = s;
    return true;
  }
  return wait(c, [&] { return h->sense == s; });
}
static int join(Comm **out, int n, const std::string &name, int r) {
  auto c = new Comm();
  c->n = n;
  c->r = r;
  c->name = name;
  c->sense = 0;
  c->size = 65536 + (size_t)n * DATA;
  std::string p = "/dev/shm/emulated_nccl_" + name;
  int fd = open(p.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, c->size)) return 2;
  c->base = (char *)mmap(0, c->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  c->h()->joined++;
  if (!wait(c, [&] { return c->h()->joined >= n; })) return 2;
  if (!barrier(c)) return 2;
  if (!r) unlink(p.c_str());
  *out = c;
  return 0;
}
static std::string hex(const Id &u) {
  std::string s;
  char b[3];
  for (int i = 0; i < 12; i++) {
    snprintf(b, 3, "%02x", (unsigned char)u.b[i]);
    s += b;
  }
  return s;
}
X int ncclGetVersion(int *v) {
  *v = 22809;
  return 0;
}
X int ncclGetUniqueId(Id *u) {
  int f = open("/dev/urandom", O_RDONLY);
  memset(u, 1, 128);
  read(f, u->b, 12);
  close(f);
  return 0;
}
X int ncclCommInitRank(Comm **c, int n, Id u, int r) { return join(c, n, hex(u), r); }
X int ncclCommInitRankConfig(Comm **c, int n, Id u, int r, void *) { return join(c, n, hex(u), r); }
X int ncclCommInitRankScalable(Comm **c, int n, int r, int, Id *u, void *) { return join(c, n, hex(u[0]), r); }
X int ncclCommInitAll(Comm **, int, const int *) { return 3; }
X int ncclCommSplit(Comm *p, int color, int key, Comm **c, void *) {
  int seq = p->splits++;
  p->h()->slots[p->r] = {100, color, key, 0, 0, 0};
  if (!barrier(p)) return 2;
  int n = 0, r = 0;
  for (int i = 0; i < p->n; i++) {
    auto &s = p->h()->slots[i];
    if (s.count != color) continue;
    n++;
    if (s.dtype < key || (s.dtype == key && i < p->r)) r++;
  }
  if (!barrier(p)) return 2;
  if (color < 0) {
    *c = nullptr;
    return 0;
  }
  return join(c, n, p->name + "_" + std::to_string(seq) + "_" + std::to_string(color), r);
}
X int ncclCommCount(Comm *c, int *n) {
  *n = c->n;
  return 0;
}
X int ncclCommUserRank(Comm *c, int *n) {
  *n = c->r;
  return 0;
}
X int ncclCommGetAsyncError(Comm *c, int *e) {
  *e = c->err;
  return 0;
}
X const char *ncclGetErrorString(int e) { return e == 5 ? "emulated NCCL: calls do not match" : "emulated NCCL error"; }
X const char *ncclGetLastError(Comm *) { return ""; }
extern "C" int cudaMalloc(void **, size_t);
extern "C" int cudaFree(void *);
X int ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n); }
X int ncclMemFree(void *p) { return cudaFree(p); }
static std::vector<double> scales;
static size_t width(int t) {
  static const size_t w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return w[t];
}
X int ncclRedOpCreatePreMulSum(int *op, void *s, int t, int, Comm *) {
  double v = t == 7 ? *(float *)s : t == 8 ? *(double *)s : 1;
  if (t == 9) {
    unsigned u = (unsigned)*(unsigned short *)s << 16;
    float f;
    memcpy(&f, &u, 4);
    v = f;
  }
  scales.push_back(v);
  *op = 5 + scales.size();
  return 0;
}
X int ncclRedOpDestroy(int, Comm *) { return 0; }
static double get(const void *p, int t, size_t i) {
  switch (t) {
  case 0:
    return ((signed char *)p)[i];
  case 1:
    return ((unsigned char *)p)[i];
  case 2:
    return ((int *)p)[i];
  case 3:
    return ((unsigned *)p)[i];
  case 4:
    return ((long *)p)[i];
  case 5:
    return ((unsigned long *)p)[i];
  case 6:
    return (double)((_Float16 *)p)[i];
  case 7:
    return ((float *)p)[i];
  case 8:
    return ((double *)p)[i];
  case 9: {
    unsigned u = (unsigned)((unsigned short *)p)[i] << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  }
  fprintf(stderr, "emulated NCCL: sums of type %d\n", t);
  abort();
}
static void put(void *p, int t, size_t i, double v) {
  switch (t) {
  case 0:
    ((signed char *)p)[i] = v;
    break;
  case 1:
    ((unsigned char *)p)[i] = v;
    break;
  case 2:
    ((int *)p)[i] = v;
    break;
  case 3:
    ((unsigned *)p)[i] = v;
    break;
  case 4:
    ((long *)p)[i] = v;
    break;
  case 5:
    ((unsigned long *)p)[i] = v;
    break;
  case 6:
    ((_Float16 *)p)[i] = v;
    break;
  case 7:
    ((float *)p)[i] = v;
    break;
  case 8:
    ((double *)p)[i] = v;
    break;
  case 9: {
    float f = v;
    unsigned u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000)
      u = 0x7fc00000;
    else
      u += 0x7fff + ((u >> 16) & 1);
    ((unsigned short *)p)[i] = u >> 16;
    break;
  }
  }
}
static void sum(char *out, std::vector<const char *> in, int t, size_t n, int op) {
  double scale = op == 4 ? 1.0 / in.size() : 1, pre = op > 5 ? scales[op - 6] : 1;
  for (size_t i = 0; i < n; i++) {
    if ((t == 4 || t == 5) && op == 0) {
      long v = 0;
      for (auto p : in) v += ((long *)p)[i];
      ((long *)out)[i] = v;
      continue;
    }
    double v = get(in[0], t, i) * pre;
    for (size_t k = 1; k < in.size(); k++) {
      double w = get(in[k], t, i) * pre;
      v = op == 1   ? v * w
          : op == 2 ? (w > v || w != w ? w : v)
          : op == 3 ? (w < v || w != w ? w : v)
          : t == 7  ? (float)v + (float)w
                    : v + w;
    }
    put(out, t, i, v * scale);
  }
}
static bool same(Comm *c, int op, long count, int t, long root, int redop) {
  static const bool lg = getenv("EMULATED_NCCL_LOG");
  if (lg) fprintf(stderr, "[%d] begin %s op %d count %ld\n", c->r, c->name.c_str() + c->name.size() - 6, op, count);
  c->h()->slots[c->r] = {op, count, t, root, redop, 0};
  if (!barrier(c)) return false;
  bool ok = true;
  if (lg) fprintf(stderr, "[%d]   met %s op %d count %ld\n", c->r, c->name.c_str() + c->name.size() - 6, op, count);
  auto &a = c->h()->slots[0];
  for (int i = 1; i < c->n; i++) {
    auto &b = c->h()->slots[i];
    if (a.op != b.op || a.count != b.count || a.dtype != b.dtype || a.root != b.root || a.redop != b.redop) {
      ok = false;
      if (!c->r)
        fprintf(
            stderr,
            "emulated NCCL: calls do not match: rank 0 op %ld count %ld type %ld root %ld; rank %d op %ld count %ld type %ld root %ld\n",
            a.op, a.count, a.dtype, a.root, i, b.op, b.count, b.dtype, b.root);
    }
  }
  return barrier(c) && ok;
}
static thread_local int depth;
static thread_local std::vector<std::function<int()>> queue_, late;
extern "C" bool emulated_graph_add(std::function<void()>);
extern "C" int cudaStreamIsCapturing(void *, int *);
extern "C" void emulated_async(void *, std::function<void()>);
static thread_local void *group_stream;
static thread_local Comm *group_comm;
static int go(std::function<int()> f, void *st, Comm *c) {
  static const bool lg = getenv("EMULATED_NCCL_LOG");
  if (lg) fprintf(stderr, "[%d] call %s stream %p\n", c->r, c->name.c_str() + c->name.size() - 6, st);
  int cap = 0;
  if (st) cudaStreamIsCapturing(st, &cap);
  if (cap) {
    emulated_graph_add([f] { f(); });
    return 0;
  }
  if (depth) {
    queue_.push_back(f);
    group_stream = st;
    group_comm = c;
    return 0;
  }
  long k = c->next++;
  emulated_async(st, [f, c, k] {
    while (c->ended != k) usleep(20);
    int e = f();
    if (e) c->err = e;
    c->ended++;
  });
  return c->err;
}
X int ncclGroupStart() {
  depth++;
  return 0;
}
X int ncclGroupEnd() {
  if (--depth) return 0;
  auto q = queue_, l = late;
  queue_.clear();
  late.clear();
  if (q.empty() && l.empty()) return 0;
  auto c = group_comm;
  long k = c->next++;
  emulated_async(group_stream, [q, l, c, k] {
    while (c->ended != k) usleep(20);
    int e = 0;
    for (auto &f : q)
      if (!e) e = f();
    for (auto &f : l)
      if (!e) e = f();
    if (e) c->err = e;
    c->ended++;
  });
  return 0;
}
X int ncclGroupSimulateEnd(void *) { return 0; }
extern "C" size_t emulated_copy_max();
static size_t shortened(size_t n, int t) { // data are moved up to a size only where nothing is computed
  size_t most = emulated_copy_max() / width(t);
  return n < most ? n : most;
}
X int ncclAllReduce(const void *s, void *d, size_t n, int t, int op, Comm *c, void *st) {
  return go(
      [=]() mutable {
        if (!same(c, 1, n, t, 0, op)) return 5;
        n = shortened(n, t);
        size_t w = width(t), step = DATA / w;
        for (size_t at = 0; at < n; at += step) {
          size_t k = std::min(step, n - at);
          memcpy(c->data(c->r), (char *)s + at * w, k * w);
          if (!barrier(c)) return 2;
          std::vector<const char *> in;
          for (int i = 0; i < c->n; i++) in.push_back(c->data(i));
          sum((char *)d + at * w, in, t, k, op);
          if (!barrier(c)) return 2;
        }
        return 0;
      },
      st, c);
}
X int ncclReduce(const void *s, void *d, size_t n, int t, int op, int root, Comm *c, void *st) {
  return go(
      [=]() mutable {
        if (!same(c, 2, n, t, root, op)) return 5;
        n = shortened(n, t);
        size_t w = width(t), step = DATA / w;
        for (size_t at = 0; at < n; at += step) {
          size_t k = std::min(step, n - at);
          memcpy(c->data(c->r), (char *)s + at * w, k * w);
          if (!barrier(c)) return 2;
          if (c->r == root) {
            std::vector<const char *> in;
            for (int i = 0; i < c->n; i++) in.push_back(c->data(i));
            sum((char *)d + at * w, in, t, k, op);
          }
          if (!barrier(c)) return 2;
        }
        return 0;
      },
      st, c);
}
X int ncclBroadcast(const void *s, void *d, size_t n, int t, int root, Comm *c, void *st) {
  return go(
      [=]() mutable {
        if (!same(c, 3, n * width(t), 0, root, 0)) return 5;
        n = shortened(n, t);
        size_t b = n * width(t);
        for (size_t at = 0; at < b; at += DATA) {
          size_t k = std::min(DATA, b - at);
          if (c->r == root) memcpy(c->data(0), (char *)s + at, k);
          if (!barrier(c)) return 2;
          memmove((char *)d + at, c->data(0), k);
          if (!barrier(c)) return 2;
        }
        return 0;
      },
      st, c);
}
X int ncclBcast(void *d, size_t n, int t, int root, Comm *c, void *st) { return ncclBroadcast(d, d, n, t, root, c, st); }
X int ncclAllGather(const void *s, void *d, size_t n, int t, Comm *c, void *st) {
  return go(
      [=]() mutable {
        if (!same(c, 4, n * width(t), 0, 0, 0)) return 5;
        n = shortened(n, t);
        size_t b = n * width(t);
        for (size_t at = 0; at < b; at += DATA) {
          size_t k = std::min(DATA, b - at);
          memcpy(c->data(c->r), (char *)s + at, k);
          if (!barrier(c)) return 2;
          for (int i = 0; i < c->n; i++) memcpy((char *)d + i * b + at, c->data(i), k);
          if (!barrier(c)) return 2;
        }
        return 0;
      },
      st, c);
}
X int ncclReduceScatter(const void *s, void *d, size_t n, int t, int op, Comm *c, void *st) {
  return go(
      [=]() mutable {
        if (!same(c, 5, n, t, 0, op)) return 5;
        n = shortened(n, t);
        size_t w = width(t), step = DATA / w / c->n;
        for (size_t at = 0; at < n; at += step) {
          size_t k = std::min(step, n - at);
          for (int i = 0; i < c->n; i++) memcpy(c->data(c->r) + i * k * w, (char *)s + (i * n + at) * w, k * w);
          if (!barrier(c)) return 2;
          std::vector<const char *> in;
          for (int i = 0; i < c->n; i++) in.push_back(c->data(i) + c->r * k * w);
          sum((char *)d + at * w, in, t, k, op);
          if (!barrier(c)) return 2;
        }
        return 0;
      },
      st, c);
}
X int ncclAlltoAll(const void *s, void *d, size_t n, int t, Comm *c, void *st) {
  return go(
      [=]() mutable {
        if (!same(c, 6, n * width(t), 0, 0, 0)) return 5;
        n = shortened(n, t);
        size_t b = n * width(t), step = DATA / c->n;
        for (size_t at = 0; at < b; at += step) {
          size_t k = std::min(step, b - at);
          for (int i = 0; i < c->n; i++) memcpy(c->data(c->r) + i * k, (char *)s + i * b + at, k);
          if (!barrier(c)) return 2;
          for (int i = 0; i < c->n; i++) memcpy((char *)d + i * b + at, c->data(i) + c->r * k, k);
          if (!barrier(c)) return 2;
        }
        return 0;
      },
      st, c);
}
static std::string box(Comm *c, int a, int b, long k) {
  return "/dev/shm/emulated_nccl_" + c->name + "_p" + std::to_string(a) + "_" + std::to_string(b) + "_" + std::to_string(k);
}
X int ncclSend(const void *s, size_t n, int t, int peer, Comm *c, void *st) {
  return go(
      [=] {
        std::string p = box(c, c->r, peer, c->sent[peer]++), q = p + ".t";
        FILE *f = fopen(q.c_str(), "w");
        fwrite(s, 1, n * width(t), f);
        fclose(f);
        rename(q.c_str(), p.c_str());
        return 0;
      },
      st, c);
}
X int ncclRecv(void *d, size_t n, int t, int peer, Comm *c, void *st) {
  auto f = [=] {
    std::string p = box(c, peer, c->r, c->got[peer]++);
    if (!wait(c, [&] { return access(p.c_str(), F_OK) == 0; })) return 2;
    struct stat st;
    stat(p.c_str(), &st);
    if ((size_t)st.st_size != n * width(t)) {
      fprintf(stderr, "emulated NCCL: rank %d receives %zu bytes of rank %d, which sent %ld\n", c->r, n * width(t), peer, (long)st.st_size);
      return 5;
    }
    FILE *g = fopen(p.c_str(), "r");
    fread(d, 1, n * width(t), g);
    fclose(g);
    unlink(p.c_str());
    return 0;
  };
  if (depth) {
    late.push_back(f);
    group_stream = st;
    group_comm = c;
    return 0;
  }
  return go(f, st, c);
}
X int ncclCommAbort(Comm *c) {
  c->abort = true;
  if (c->base) c->h()->aborted = 1;
  return 0;
}
X int ncclCommDestroy(Comm *c) { return 0; }
X int ncclCommFinalize(Comm *) { return 0; }
#define Z(name)                                                                                                                            \
  X int name() { return 0; }
Z(ncclCommDeregister)
Z(ncclCommRegister)
Z(ncclCommShrink)
Z(ncclCommWindowDeregister)
Z(ncclCommWindowRegister)
Z(ncclDevCommCreate)
Z(ncclDevCommDestroy)
