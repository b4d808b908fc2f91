// Shared memory in huge pages, for everybody.
//
// Files behind memfd live on the kernel's own mount, and most systems forbid huge pages there. A tmpfs mounted by its user
// may ask for them, and whoever is the head of a user namespace may mount one. So a child process goes into namespaces of
// its own, mounts, opens one file without a name in it, and ends; the mount lives as long as that file is open or mapped.
#include <ds/shm.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace ds::shm {

namespace {

// New in Linux 5.2, the same numbers on all machines; older headers have no names for them.
constexpr long sys_fsopen = 430, sys_fsconfig = 431, sys_fsmount = 432;
constexpr int cloexec_flag = 1, set_string = 1, create = 6;
constexpr std::size_t stack_bytes = 32 << 10;

struct Request {
  unsigned uid, gid;
  int fd;  // of the file, or -errno
};

bool say(const char *path, const char *text) {
  const int fd = ::open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const auto size = static_cast<ssize_t>(std::strlen(text));
  const bool good = ::write(fd, text, static_cast<std::size_t>(size)) == size;
  ::close(fd);
  return good;
}

// Without this the new namespace knows no user, and nobody can own a file.
bool be_the_same_user(const Request &request) {
  char uids[64], gids[64];
  std::snprintf(uids, sizeof uids, "%u %u 1", request.uid, request.uid);
  std::snprintf(gids, sizeof gids, "%u %u 1", request.gid, request.gid);
  return say("/proc/self/setgroups", "deny") && say("/proc/self/uid_map", uids) && say("/proc/self/gid_map", gids);
}

int mounted() {
  const int context = static_cast<int>(::syscall(sys_fsopen, "tmpfs", cloexec_flag));
  if (context < 0) return -errno;
  // `advise`: pages are huge where a mapping asks for it. `size` 0: no limit of its own, as memfd has none.
  const char *settings[][2] = {{"huge", "advise"}, {"size", "0"}, {"mode", "0700"}};
  long bad = 0;
  for (const auto &setting : settings) bad |= ::syscall(sys_fsconfig, context, set_string, setting[0], setting[1], 0);
  bad |= ::syscall(sys_fsconfig, context, create, nullptr, nullptr, 0);
  const int mount = bad ? -1 : static_cast<int>(::syscall(sys_fsmount, context, cloexec_flag, 0));
  const int found = mount < 0 ? -errno : mount;
  ::close(context);
  return found;
}

// In the child. It shares memory and descriptors with its parent, which sleeps meanwhile.
int open_huge(void *argument) {
  Request &request = *static_cast<Request *>(argument);
  if (!be_the_same_user(request)) {
    request.fd = -errno;
    return 0;
  }
  const int mount = mounted();
  if (mount < 0) {
    request.fd = mount;
    return 0;
  }
  const int fd = ::openat(mount, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  request.fd = fd < 0 ? -errno : fd;
  ::close(mount);
  return 0;
}

}  // namespace

int huge_file() {
  Request request{::geteuid(), ::getegid(), -EPERM};
  alignas(64) unsigned char stack[stack_bytes];
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of ours may run in the child
  // No signal at its end either (the low byte of the flags): others may watch for children of their own.
  const int flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_NEWUSER | CLONE_NEWNS;
  const int child = ::clone(open_huge, stack + stack_bytes, flags, &request);
  const int refused = errno;
  if (child > 0)
    while (::waitpid(child, nullptr, __WALL) < 0 && errno == EINTR) {
    }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return child < 0 ? -refused : request.fd;
}

}  // namespace ds::shm
