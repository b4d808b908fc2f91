#include <ds/shm.h>
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "progress.h"

namespace py = pybind11;
using namespace ds::shm;

namespace {

py::tuple told(const Outcome &o) { return py::make_tuple(static_cast<int>(o.code), o.rank); }

// Whether a signal handler of Python raised; only in the main thread anything is handled here.
bool python_interrupted() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Lets what runs meanwhile in this thread be ended by Python's signal handlers; the GIL is released.
class Interruptible {
 public:
  Interruptible() { set_interrupted(&python_interrupted); }
  ~Interruptible() { set_interrupted(nullptr); }
  Interruptible(const Interruptible &) = delete;

 private:
  py::gil_scoped_release nogil_;
};

void raise_if_interrupted() {
  if (PyErr_Occurred()) throw py::error_already_set();
}

std::vector<Peer> watched(const std::vector<int> &pids) {
  std::vector<Peer> peers;
  for (int pid : pids) {
#if defined(SYS_pidfd_open)
    const int pidfd = pid == ::getpid() ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
    const int pidfd = -1;
#endif
    peers.push_back({pid, pidfd});
  }
  return peers;
}

void let_go(std::vector<Peer> &peers) {
  for (const Peer &p : peers)
    if (p.pidfd >= 0) ::close(p.pidfd);
  peers.clear();
}

void *mapped(int fd, std::size_t nbytes, std::int64_t offset) {
  void *base = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (base != MAP_FAILED) return base;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

// Counters in a mapping of their own.
class MappedCounters {
 public:
  MappedCounters(int fd, std::int64_t offset, int rank, const std::vector<int> &pids)
      : bytes_(static_cast<std::size_t>(counters_bytes(static_cast<int>(pids.size())))),
        base_(mapped(fd, bytes_, offset)),
        peers_(watched(pids)),
        counters_(base_, rank, static_cast<int>(pids.size()), peers_.data()) {}
  ~MappedCounters() {
    ::munmap(base_, bytes_);
    let_go(peers_);
  }
  MappedCounters(const MappedCounters &) = delete;

  std::uint32_t advance() { return counters_.advance(); }
  int behind(std::uint32_t value) const { return counters_.behind(value); }
  py::tuple wait(std::uint32_t value, int spin_us, std::int64_t timeout_ms) {
    if (counters_.behind(value) < 0) return told({});
    Outcome o;
    {
      py::gil_scoped_release nogil;
      o = counters_.wait(value, spin_us, timeout_ms);
    }
    return told(o);
  }

 private:
  std::size_t bytes_;
  void *base_;
  std::vector<Peer> peers_;
  Counters counters_;
};

// A mapped segment, the channel over it, and its threads. Memory of queued calls is kept alive by the Python side.
class Endpoint {
 public:
  Endpoint(int fd, std::int64_t slot_bytes, std::int64_t mailbox_bytes, int rank, std::vector<int> pids)
      : layout_{slot_bytes, mailbox_bytes}, world_(static_cast<int>(pids.size())) {
    if (const char *why = layout_.refusal(world_)) throw std::invalid_argument(why);
    bytes_ = static_cast<std::size_t>(layout_.total(world_));
    base_ = mapped(fd, bytes_, 0);
    peers_ = watched(pids);
    channel_ = std::make_unique<Channel>(base_, layout_, rank, world_, peers_.data());
    progress_ = std::make_unique<Progress>(*channel_);
  }
  ~Endpoint() { close(); }
  Endpoint(const Endpoint &) = delete;

  void close() {
    if (!channel_) return;
    if (::getpid() != owner_) {  // a forked child has none of the threads; the channel is its parent's
      static_cast<void>(progress_.release());
      static_cast<void>(channel_.release());
      return;
    }
    {
      py::gil_scoped_release nogil;
      progress_.reset();
      channel_.reset();
    }
    ::munmap(base_, bytes_);
    let_go(peers_);
  }

  // A barrier, and what all have come to read: dst[i] = op over k of src[k][i].
  py::tuple pull(std::uintptr_t dst, const std::vector<std::uintptr_t> &src, int element, int op, std::int64_t n, int spin_us,
                 std::int64_t timeout_ms) {
    const Call meet = call(static_cast<int>(Verb::barrier), static_cast<int>(Element::u8), 0, 0, 0, 0, 0, {}, {});
    std::vector<const void *> sources;
    for (auto s : src) sources.push_back(reinterpret_cast<const void *>(s));
    Outcome o;
    {
      Interruptible waiting;
      o = progress_->run(meet, spin_us, timeout_ms);
      if (o.code == Code::ok)
        combine(reinterpret_cast<void *>(dst), sources.data(), static_cast<int>(sources.size()), static_cast<Element>(element),
                static_cast<Op>(op), n);
    }
    raise_if_interrupted();
    return told(o);
  }

  Call call(int verb, int element, int op, int root, std::int64_t n, std::uintptr_t in, std::uintptr_t out,
            const std::vector<std::int64_t> &send, const std::vector<std::int64_t> &receive) const {
    if (!channel_) throw std::runtime_error("the channel is closed");
    return {static_cast<Verb>(verb), static_cast<Element>(element), static_cast<Op>(op), root, n,
            reinterpret_cast<const unsigned char *>(in), reinterpret_cast<unsigned char *>(out),
            send.empty() ? nullptr : send.data(), receive.empty() ? nullptr : receive.data()};
  }

  py::tuple run(int verb, int element, int op, int root, std::int64_t n, std::uintptr_t in, std::uintptr_t out,
                const std::vector<std::int64_t> &send, const std::vector<std::int64_t> &receive, int spin_us,
                std::int64_t timeout_ms) {
    const Call c = call(verb, element, op, root, n, in, out, send, receive);
    Outcome o;
    {
      Interruptible waiting;
      o = progress_->run(c, spin_us, timeout_ms);
    }
    raise_if_interrupted();
    return told(o);
  }
  std::shared_ptr<Job> start(int verb, int element, int op, int root, std::int64_t n, std::uintptr_t in, std::uintptr_t out,
                             const std::vector<std::int64_t> &send, const std::vector<std::int64_t> &receive,
                             std::int64_t timeout_ms, int spin_us) {
    return progress_->start(call(verb, element, op, root, n, in, out, send, receive), world_, spin_us, timeout_ms);
  }
  // As `start`; parts: (address, row, pitch) of what goes to each rank, then of what comes from each.
  std::shared_ptr<Job> start_parts(int verb, int element, const std::vector<std::int64_t> &send,
                                   const std::vector<std::int64_t> &receive,
                                   const std::vector<std::tuple<std::uintptr_t, std::int64_t, std::int64_t>> &parts,
                                   std::int64_t timeout_ms, int spin_us) {
    const std::size_t world = static_cast<std::size_t>(world_);
    if (send.size() != world || receive.size() != world || parts.size() != 2 * world)
      throw std::invalid_argument("one size and one part for each rank");
    std::vector<Part> found;
    for (std::size_t i = 0; i < parts.size(); i++) {
      const auto &[address, row, pitch] = parts[i];
      const std::int64_t nbytes = (i < world ? send[i] : receive[i - world]) * size_of(static_cast<Element>(element));
      if (row < 1 || nbytes % row) throw std::invalid_argument("a part is not of whole rows");
      found.push_back({reinterpret_cast<unsigned char *>(address), row, pitch});
    }
    Call c = call(verb, element, 0, 0, 0, 0, 0, send, receive);
    c.parts = found.data();
    return progress_->start(c, world_, spin_us, timeout_ms);
  }
  std::shared_ptr<Job> post(bool outgoing, int peer, std::int64_t tag, std::uintptr_t data, std::int64_t nbytes,
                            std::int64_t timeout_ms) {
    if (!channel_) throw std::runtime_error("the channel is closed");
    return progress_->post({outgoing, peer, tag, reinterpret_cast<unsigned char *>(data), nbytes}, timeout_ms);
  }
  // A sum over the ranks for native code that runs in a thread of Python without its lock: (function, argument).
  py::tuple sum_hook(int spin_us, std::int64_t timeout_ms) {
    if (!channel_) throw std::runtime_error("the channel is closed");
    sum_spin_us_ = spin_us, sum_timeout_ms_ = timeout_ms, summed_ = {};
    return py::make_tuple(reinterpret_cast<std::uintptr_t>(&Endpoint::sum), reinterpret_cast<std::uintptr_t>(this));
  }
  py::tuple summed() {
    raise_if_interrupted();
    return told(summed_);
  }
  static bool sum(void *end, float *x, std::int64_t n) {
    Endpoint &e = *static_cast<Endpoint *>(end);
    unsigned char *at = reinterpret_cast<unsigned char *>(x);
    const Call c = {Verb::all_reduce, Element::f32, Op::sum, 0, n, at, at, nullptr, nullptr};
    set_interrupted(&python_interrupted);
    e.summed_ = e.progress_->run(c, e.sum_spin_us_, e.sum_timeout_ms_);
    set_interrupted(nullptr);
    return e.summed_.code == Code::ok;
  }
  void abort() {
    if (channel_) channel_->abort();
  }

 private:
  Layout layout_;
  int world_;
  pid_t owner_ = ::getpid();
  std::size_t bytes_ = 0;
  void *base_ = nullptr;
  std::vector<Peer> peers_;
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Progress> progress_;
  int sum_spin_us_ = 0;
  std::int64_t sum_timeout_ms_ = -1;
  Outcome summed_;
};

}  // namespace

void bind_shm(py::module_ &m) {
  py::class_<Job, std::shared_ptr<Job>>(m, "ShmJob")
      .def("wait",
           [](Job &job, std::int64_t timeout_ms) {
             bool over;
             {
               Interruptible waiting;
               over = job.wait(timeout_ms);
             }
             raise_if_interrupted();
             return over;
           },
           py::arg("timeout_ms"))
      .def("done", &Job::done)
      .def("outcome", [](const Job &job) { return told(job.outcome()); });
  py::class_<Endpoint>(m, "ShmEndpoint")
      .def(py::init<int, std::int64_t, std::int64_t, int, std::vector<int>>(), py::arg("fd"), py::arg("slot_bytes"),
           py::arg("mailbox_bytes"), py::arg("rank"), py::arg("pids"))
      .def("run", &Endpoint::run)
      .def("start", &Endpoint::start, py::arg("verb"), py::arg("element"), py::arg("op"), py::arg("root"), py::arg("n"),
           py::arg("inp"), py::arg("out"), py::arg("send"), py::arg("receive"), py::arg("timeout_ms"), py::arg("spin_us") = 200)
      .def("start_parts", &Endpoint::start_parts, py::arg("verb"), py::arg("element"), py::arg("send"), py::arg("receive"),
           py::arg("parts"), py::arg("timeout_ms"), py::arg("spin_us") = 200)
      .def("post", &Endpoint::post)
      .def("pull", &Endpoint::pull)
      .def("sum_hook", &Endpoint::sum_hook, py::arg("spin_us"), py::arg("timeout_ms"))
      .def("summed", &Endpoint::summed)
      .def("abort", &Endpoint::abort)
      .def("close", &Endpoint::close);
  py::class_<MappedCounters>(m, "ShmCounters")
      .def(py::init<int, std::int64_t, int, const std::vector<int> &>(), py::arg("fd"), py::arg("offset"), py::arg("rank"),
           py::arg("pids"))
      .def("advance", &MappedCounters::advance)
      .def("behind", &MappedCounters::behind, py::arg("value"))
      .def("wait", &MappedCounters::wait, py::arg("value"), py::arg("spin_us"), py::arg("timeout_ms"));
  m.def("shm_counters_bytes", &counters_bytes, py::arg("world"));
  m.def(
      "shm_total_bytes",
      [](std::int64_t slot_bytes, std::int64_t mailbox_bytes, int world) { return Layout{slot_bytes, mailbox_bytes}.total(world); },
      py::arg("slot_bytes"), py::arg("mailbox_bytes"), py::arg("world"));
  m.def(
      "shm_refusal",
      [](std::int64_t slot_bytes, std::int64_t mailbox_bytes, int world) {
        const char *why = Layout{slot_bytes, mailbox_bytes}.refusal(world);
        return std::string(why ? why : "");
      },
      py::arg("slot_bytes"), py::arg("mailbox_bytes"), py::arg("world"));
  m.def("shm_huge_file", &huge_file, py::call_guard<py::gil_scoped_release>());
  m.def("shm_combine", [](std::uintptr_t dst, const std::vector<std::uintptr_t> &src, int element, int op, std::int64_t n) {
    std::vector<const void *> sources;
    for (auto s : src) sources.push_back(reinterpret_cast<const void *>(s));
    py::gil_scoped_release nogil;
    combine(reinterpret_cast<void *>(dst), sources.data(), static_cast<int>(src.size()), static_cast<Element>(element),
            static_cast<Op>(op), n);
  });
}
