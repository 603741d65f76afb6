// A CUDA runtime without a GPU, preloaded (LD_PRELOAD) under an unmodified torch. docs/dev/simcuda.md says how it works.
//
// Device memory is a memfd that is mapped twice: at the address that programs see, which no access is ever allowed to,
// and SHIFT bytes further, where the tasks of streams work. So the host's reads and writes are caught at any moment.
// A stream is a thread with a queue; each copy and launch waits a seeded time before it reads.
//
// Nothing here waits in cudaFree, because torch calls it under its allocator's mutex, which another thread may want while
// it holds the GIL, which a task may want.

#include <cxxabi.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Numbers of cudaError_t.
enum Error : int {
    SUCCESS = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    UNINITIALIZED_DEVICE = 201, MAP_FAILED_ = 205, NO_PEER = 217, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, PEER_ALREADY = 704, PEER_NOT_ENABLED = 705, REGISTERED_ALREADY = 712, NOT_REGISTERED = 713,
    LAUNCH_FAILURE = 719, NOT_PERMITTED = 800, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908,
};

struct Said { int error; const char* name; const char* text; };
const Said SAID[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {NO_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NOT_INITIALIZED, "cudaErrorInitializationError", "initialization error"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {UNINITIALIZED_DEVICE, "cudaErrorDeviceUninitialized", "invalid device context"},
    {MAP_FAILED_, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
    {NO_PEER, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {PEER_ALREADY, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {PEER_NOT_ENABLED, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {REGISTERED_ALREADY, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {LAUNCH_FAILURE, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {NOT_PERMITTED, "cudaErrorNotPermitted", "operation not permitted"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {CAPTURE_UNJOINED, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};

constexpr uint64_t WINDOW = 0x200000000000, SHIFT = 0x100000000000, REGION = uint64_t(1) << 40;
constexpr int MOST_DEVICES = 8;
constexpr uint64_t GRAIN = 2 << 20;  // what an allocation takes is a multiple of it
constexpr uint64_t PATTERN = 0x7FF57FF57FF57FF5;  // NaN in float64, float32, float16 and bfloat16

struct Stream;
struct Graph;

struct Settings {
    int devices = 1;
    uint64_t total = uint64_t(1) << 30, seed = 1;
    double delay = 5;  // ms
    bool peers = true;
    long fail_allocation = 0, fail_task = 0;  // the n-th from now; 0 is never
    std::vector<int> visible;
};

struct Allocation {
    uint64_t address, size, taken;
    int device, fd;
    bool imported = false;
    int uses = 1;  // of an imported one
    std::string handle;
};

struct Task {
    std::function<void()> run;
    bool delayed;
};

struct Ticket { std::shared_ptr<Stream> stream; uint64_t number = 0; };

// The state of an event; lies in shared memory if other processes may wait for it.
struct Moment {
    std::atomic<uint64_t> recorded, done;
    std::atomic<double> time;
};

struct Capture {
    uint64_t id;
    Graph* graph;
    Stream* origin;
    int mode;
    pthread_t thread;
    bool invalid = false;
    std::set<Stream*> streams, unjoined;
};

struct Event {
    bool timing = true, shared = false;
    int fd = -1;
    Moment* moment = nullptr;
    std::shared_ptr<Capture> capture;  // in which it was last recorded
    std::set<Stream*> joins;           // streams whose captured work it covers
    ~Event() {
        if (shared) munmap(moment, 4096);
        else delete moment;
        if (fd >= 0) close(fd);
    }
};

struct Stream : std::enable_shared_from_this<Stream> {
    int device, priority = 0;
    bool blocking, ending = false;
    std::deque<Task> queue;
    uint64_t put = 0, done = 0;
    std::mt19937_64 chance;
    std::condition_variable any;
    std::shared_ptr<Capture> capture;
};

struct Graph { std::vector<Task> nodes; };

// All that is made is never unmade: stream threads run until the process ends.
struct World {
    std::mutex mutex;
    std::condition_variable moved;
    Settings settings;
    std::map<uint64_t, Allocation> memory;                  // by address
    std::map<uint64_t, std::pair<uint64_t, bool>> pinned;   // address: size, whether it is registered
    std::set<Graph*> graphs;
    std::map<Stream*, std::shared_ptr<Stream>> streams;
    std::map<Event*, std::shared_ptr<Event>> events;
    std::shared_ptr<Stream> legacy[MOST_DEVICES];
    uint64_t next[MOST_DEVICES], used[MOST_DEVICES];
    bool active[MOST_DEVICES], peer[MOST_DEVICES][MOST_DEVICES];
    std::vector<std::shared_ptr<Capture>> captures;
    uint64_t made = 0, captured = 0;
    std::atomic<int> sticky{0}, running{0};
    std::atomic<bool> closed{false}, begun{false}, forked{false}, looked{false};
    std::atomic<uint64_t> tasks{0}, allocations{0};
};
World& world = *new World;
std::unordered_map<const void*, const char*>& kernels = *new std::unordered_map<const void*, const char*>;
thread_local int current = 0, last = 0, capture_mode = 0;
thread_local bool in_task = false;
thread_local std::shared_ptr<Stream> own_stream;
using Lock = std::unique_lock<std::mutex>;

[[noreturn]] void die(const char* what, const char* name) {
    fprintf(stderr, "simcuda: %s: %s (seed %lu)\n", name, what, (unsigned long)world.settings.seed);
    fflush(stderr);
    abort();
}

// ---- set-up

uint64_t number(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    char* end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (*end == 'K') value <<= 10, end++;
    else if (*end == 'M') value <<= 20, end++;
    else if (*end == 'G') value <<= 30, end++;
    if (*end || errno || *text == '-') die("is not a number with K, M, G or nothing behind it", name);
    return value;
}

std::string uuid_of(int physical) {
    std::string bytes = "simcuda device ";
    return bytes + char('0' + physical);
}

std::string uuid_text(int physical) {
    std::string bytes = uuid_of(physical), text = "GPU-";
    char two[3];
    for (int i = 0; i < 16; i++) {
        snprintf(two, sizeof two, "%02x", (unsigned char)bytes[i]);
        if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += two;
    }
    return text;
}

// CUDA_VISIBLE_DEVICES as CUDA reads it: numbers or the beginnings of UUIDs, up to the first one that there is not.
void see() {
    Settings& s = world.settings;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int i = 0; i < s.devices; i++) s.visible.push_back(i);
        return;
    }
    std::string rest = text;
    for (;;) {
        size_t comma = rest.find(',');
        std::string one = rest.substr(0, comma);
        one.erase(0, one.find_first_not_of(' '));
        int found = -1;
        if (one.rfind("GPU-", 0) == 0) {
            for (int i = 0; i < s.devices; i++)
                if (uuid_text(i).rfind(one, 0) == 0) found = i;
        } else if (!one.empty()) {
            char* end;
            long value = strtol(one.c_str(), &end, 10);
            while (*end == ' ') end++;
            if (!*end && value >= 0 && value < s.devices) found = (int)value;
        }
        for (int seen : s.visible)
            if (seen == found) { s.visible.clear(); return; }  // named twice: none is seen
        if (found < 0) return;
        s.visible.push_back(found);
        if (comma == std::string::npos) return;
        rest = rest.substr(comma + 1);
    }
}

struct sigaction before_us;

void on_fault(int signal, siginfo_t* info, void* context) {
    uint64_t at = (uint64_t)info->si_addr;
    if (at >= WINDOW && at < WINDOW + SHIFT) {
        bool writes = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
        char text[200];
        int n = snprintf(text, sizeof text, "simcuda: the host %s device memory at 0x%lx, on device %d (seed %lu)\n",
                         writes ? "writes" : "reads", (unsigned long)at, (int)((at - WINDOW) / REGION),
                         (unsigned long)world.settings.seed);
        if (write(2, text, n) < 0) {}
    } else if (at >= WINDOW + SHIFT && at < WINDOW + 2 * SHIFT) {
        const char* text = "simcuda: a task uses device memory that is not allocated\n";
        if (write(2, text, strlen(text)) < 0) {}
    }
    sigaction(signal, &before_us, nullptr);  // the instruction comes again, and ends the process as without us
}

void child_of_fork() {
    if (world.begun) world.forked = true;  // as CUDA: a fork of a process that has used it can't
    else world.looked = false;             // nodes are forks, each of which gets devices of its own
}

// At the first call and not before, as CUDA: who forks processes may set what each of them sees.
void look() {
    if (world.looked) return;
    static std::mutex& mutex = *new std::mutex;
    Lock lock(mutex);
    if (world.looked) return;
    world.settings.visible.clear();
    see();
    for (int d = 0; d < MOST_DEVICES; d++)  // an address of another process is not one of this process
        world.next[d] = WINDOW + d * REGION + (uint64_t)(getpid() % 512) * (uint64_t(1) << 30);
    world.looked = true;
}

bool begin() {
    Settings& s = world.settings;
    s.devices = (int)number("SIMCUDA_DEVICES", 1);
    if (s.devices > MOST_DEVICES) die("more than 8", "SIMCUDA_DEVICES");
    s.total = number("SIMCUDA_MEMORY", s.total);
    s.seed = number("SIMCUDA_SEED", 1);
    s.delay = number("SIMCUDA_DELAY_MS", 5);
    s.peers = number("SIMCUDA_PEERS", 1);
    s.fail_allocation = number("SIMCUDA_FAIL_ALLOCATION", 0);
    s.fail_task = number("SIMCUDA_FAIL_TASK", 0);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before_us);
    pthread_atfork(nullptr, nullptr, child_of_fork);
    return true;
}
const bool loaded = begin();  // when the library is, behind what stands above

// ---- waiting

// The GIL, if the thread has it, is given away while it waits: tasks may need it. Python is not linked, but looked up.
struct WithoutGil {
    void* state = nullptr;
    WithoutGil() {
        static auto initialized = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
        static auto check = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
        static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
        if (initialized && initialized() && check() ) state = save();
    }
    ~WithoutGil() {
        static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
        if (state) restore(state);
    }
};

template <class Done>
int wait_for(const char* name, Done done, bool polls = false) {
    if (in_task) die("waits inside a task of a stream, which CUDA forbids", name);
    WithoutGil without;
    Lock lock(world.mutex);
    // After an error a task that runs is waited for: it may be writing what the caller is about to give back.
    while (!done() && (!world.sticky || world.running)) {
        if (polls) world.moved.wait_for(lock, std::chrono::microseconds(200));  // another process tells nobody
        else world.moved.wait(lock);
    }
    return world.sticky;
}

void work(std::shared_ptr<Stream> self) {
    pthread_setname_np(pthread_self(), "simcuda");
    Lock lock(world.mutex);
    for (;;) {
        self->any.wait(lock, [&] { return !self->queue.empty() || self->ending; });
        if (self->queue.empty()) return;
        Task task = std::move(self->queue.front());
        self->queue.pop_front();
        double wait = task.delayed ? std::uniform_real_distribution<>(0, world.settings.delay)(self->chance) : 0;
        if (task.delayed && world.settings.fail_task && --world.settings.fail_task == 0) world.sticky = ILLEGAL_ADDRESS;
        lock.unlock();
        if (wait > 0) {
            timespec t = {0, long(wait * 1e6)};
            t.tv_sec = t.tv_nsec / 1000000000, t.tv_nsec %= 1000000000;
            nanosleep(&t, nullptr);
        }
        world.running++;
        if (!world.closed && (!world.sticky || !task.delayed)) {
            in_task = true;
            task.run();
            in_task = false;
        }
        world.running--;
        task.run = nullptr;
        lock.lock();
        self->done++;
        world.tasks++;
        world.moved.notify_all();
    }
}

std::shared_ptr<Stream> start(int device, bool blocking, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->device = device;
    stream->blocking = blocking;
    stream->priority = priority;
    stream->chance.seed(world.settings.seed * 1000003 + world.made++);
    world.streams[stream.get()] = stream;
    world.active[device] = true;
    world.begun = true;
    sigset_t all, old;  // signals are the program's threads' own
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    std::thread(work, stream).detach();
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    return stream;
}

std::shared_ptr<Stream> legacy_of(int device) {
    if (!world.legacy[device]) world.legacy[device] = start(device, true, 0);
    return world.legacy[device];
}

std::shared_ptr<Stream> found(void* handle) {
    if ((uintptr_t)handle <= 1) return legacy_of(current);
    if ((uintptr_t)handle == 2) {
        if (!own_stream || own_stream->device != current) own_stream = start(current, true, 0);
        return own_stream;
    }
    auto it = world.streams.find((Stream*)handle);
    return it == world.streams.end() ? nullptr : it->second;
}

void put(const std::shared_ptr<Stream>& stream, std::function<void()> run, bool delayed) {
    stream->queue.push_back({std::move(run), delayed});
    stream->put++;
    stream->any.notify_one();
}

// Inside a task, which waits for others of its own process, or by looking again for one of another process.
template <class Done>
void stand(Done done, bool polls) {
    Lock lock(world.mutex);
    while (!done() && !world.sticky && !world.closed) {
        if (polls) world.moved.wait_for(lock, std::chrono::microseconds(200));
        else world.moved.wait(lock);
    }
}

void put_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Stream>& other) {
    uint64_t number = other->put;
    if (other == stream || other->done >= number) return;
    put(stream, [other, number] { stand([&] { return other->done >= number; }, false); }, false);
}

// The legacy stream of a device and its blocking streams wait for each other's earlier work.
int enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> run, bool delayed = true) {
    if (stream->capture) {
        if (stream->capture->invalid) return CAPTURE_INVALIDATED;
        stream->capture->graph->nodes.push_back({std::move(run), delayed});
        if (stream.get() != stream->capture->origin) stream->capture->unjoined.insert(stream.get());
        return SUCCESS;
    }
    auto& legacy = world.legacy[stream->device];
    if (stream == legacy) {
        for (auto& [_, other] : world.streams)
            if (other->device == stream->device && other->blocking && other->capture) {
                other->capture->invalid = true;
                return CAPTURE_IMPLICIT;
            }
        for (auto& [_, other] : world.streams)
            if (other->device == stream->device && other->blocking) put_wait(stream, other);
    } else if (stream->blocking && legacy) put_wait(stream, legacy);
    put(stream, std::move(run), delayed);
    return SUCCESS;
}

// What a call answers, and what cudaGetLastError will say.
int say(int error) {
    if (world.sticky) error = world.sticky;
    if (error && error != NOT_READY) last = error;
    return error;
}

// For what only tells of the devices, or sets the thread's: torch's guards do that while an error unwinds the stack.
#define THERE()                                                       \
    do {                                                              \
        look();                                                       \
        if (world.forked) return say(NOT_INITIALIZED);                \
        if (world.settings.visible.empty()) return say(NO_DEVICE);    \
    } while (0)
#define READY()                                                       \
    do {                                                              \
        THERE();                                                      \
        if (world.sticky) return say(world.sticky);                   \
    } while (0)

// Calls that a capture of this thread does not allow, and a global one of no thread (they would wait or allocate behind
// its back), unless this thread has relaxed its mode: wholly, or as to captures of other threads.
int unsafe() {
    for (auto& capture : world.captures) {
        bool mine = pthread_equal(capture->thread, pthread_self());
        if (capture_mode == 2 || capture->mode == 2 || !(mine || (capture->mode == 0 && capture_mode == 0))) continue;
        capture->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

// The error of a wait for an event that was captured: it stands for nothing that would ever be done.
int waits_for_captured(const std::shared_ptr<Capture>& capture) {
    capture->invalid = true;
    return CAPTURED_EVENT;
}

// ---- memory

bool is_device(const void* p) { return (uint64_t)p >= WINDOW && (uint64_t)p < WINDOW + SHIFT; }

Allocation* holding(uint64_t address, uint64_t size = 0) {
    auto it = world.memory.upper_bound(address);
    if (it == world.memory.begin()) return nullptr;
    Allocation& a = std::prev(it)->second;
    return address + size <= a.address + a.size && (address < a.address + a.size) ? &a : nullptr;
}

bool is_pinned(const void* p) {
    auto it = world.pinned.upper_bound((uint64_t)p);
    if (it == world.pinned.begin()) return false;
    --it;
    return (uint64_t)p < it->first + it->second.first;
}

void fill(void* to, uint64_t pattern, size_t size) {
    char* at = (char*)to;
    for (; size >= 8; size -= 8, at += 8) memcpy(at, &pattern, 8);
    memcpy(at, &pattern, size);
}

char* inside(const void* p) { return (char*)p + (is_device(p) ? SHIFT : 0); }

// Maps a memfd at an address of the window, closed, and for tasks. Returns whether that went.
bool map(uint64_t address, uint64_t size, int fd) {
    void* seen = mmap((void*)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
    if (seen == MAP_FAILED) return false;
    void* work = mmap((void*)(address + SHIFT), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
    if (work == MAP_FAILED) {
        munmap(seen, size);
        return false;
    }
    return true;
}

uint64_t room(int device, uint64_t size) {
    uint64_t at = world.next[device];
    world.next[device] += (size + GRAIN - 1) / GRAIN * GRAIN + GRAIN;  // a hole behind each one
    return at;
}

// What processes on these devices hold, in a file (SIMCUDA_LEDGER) that they share: pid and bytes of each device.
struct Line { std::atomic<int> pid; std::atomic<uint64_t> used[MOST_DEVICES]; };
constexpr int LINES = 128;

Line* ledger() {
    static Line* lines = [] {
        const char* path = getenv("SIMCUDA_LEDGER");
        if (!path) return (Line*)nullptr;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(Line) * LINES)) die("can't be opened", "SIMCUDA_LEDGER");
        void* at = mmap(nullptr, sizeof(Line) * LINES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (at == MAP_FAILED) die("can't be mapped", "SIMCUDA_LEDGER");
        return (Line*)at;
    }();
    return lines;
}

uint64_t used_by_all(int physical, int mine) {
    uint64_t used = world.used[mine];
    if (Line* lines = ledger())
        for (int i = 0; i < LINES; i++) {
            int pid = lines[i].pid;
            if (pid && pid != getpid() && (kill(pid, 0) == 0 || errno == EPERM)) used += lines[i].used[physical];
        }
    return used;
}

void note_used(int device) {
    Line* lines = ledger();
    static int own = -1;
    if (!lines) return;
    for (int i = 0; own < 0 && i < LINES; i++) {
        int pid = lines[i].pid;
        if (pid && (kill(pid, 0) == 0 || errno == EPERM)) continue;
        if (lines[i].pid.compare_exchange_strong(pid, getpid())) {
            for (auto& used : lines[i].used) used = 0;
            own = i;
        }
    }
    if (own < 0) die("more than 128 processes", "SIMCUDA_LEDGER");
    lines[own].used[world.settings.visible[device]] = world.used[device];
}

struct Handle {  // of 64 bytes
    char sign[8];
    int pid, fd, physical;
    uint64_t size, offset, id;
};
static_assert(sizeof(Handle) <= 64);

int copy(void* to, const void* from, size_t size, void* handle, bool waits, const char* name) {
    READY();
    if (!size) return say(SUCCESS);
    std::shared_ptr<Stream> stream;
    uint64_t number;
    {
        Lock lock(world.mutex);
        stream = found(handle);
        if (!stream) return say(INVALID_HANDLE);
        for (const void* p : {(const void*)to, from})
            if (is_device(p) && !holding((uint64_t)p, size)) return say(INVALID_VALUE);
        bool down = !is_device(to) && !is_pinned(to), up = !is_device(from) && !is_pinned(from);
        if (stream->capture && (waits || down)) {
            stream->capture->invalid = true;
            return say(CAPTURE_UNSUPPORTED);
        }
        char *target = inside(to), *source = inside(from);
        std::function<void()> run = [=] { memmove(target, source, size); };
        if (up && !stream->capture) {
            // the bytes are staged at once, and go to the device later
            auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
            run = [=] { memcpy(target, staged->data(), size); };
            if (is_device(to)) waits = false;
        }
        if (is_device(to) && is_device(from)) waits = false;
        int error = enqueue(stream, run);
        if (error) return say(error);
        waits = waits || down;
        number = stream->put;
    }
    if (waits) return say(wait_for(name, [&] { return stream->done >= number; }));
    return say(SUCCESS);
}

int set(void* to, int value, size_t size, void* handle) {
    READY();
    if (!size) return say(SUCCESS);
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    if (is_device(to) && !holding((uint64_t)to, size)) return say(INVALID_VALUE);
    char* target = inside(to);
    return say(enqueue(stream, [=] { memset(target, value, size); }));
}

}  // namespace

// ---- what tests and the kernels in Python ask for

// A stream's handle, which for the default streams stands for those of the device.
static std::shared_ptr<Stream> on_device(int device, void* handle) {
    std::swap(current, device);
    auto stream = found(handle);
    std::swap(current, device);
    return stream;
}
EXPORT int simcuda_launch(int device, void* handle, void (*call)(void*), void* data) {
    READY();
    Lock lock(world.mutex);
    auto stream = on_device(device, handle);
    if (!stream) return say(INVALID_HANDLE);
    return say(enqueue(stream, [=] { call(data); }));
}
// Fills memory of a device at once when the stream comes to it: a block that was free must not show what was in it.
EXPORT int simcuda_fill(int device, void* to, uint64_t pattern, size_t size, void* handle) {
    READY();
    if (!size) return SUCCESS;
    Lock lock(world.mutex);
    auto stream = on_device(device, handle);
    if (!stream || !holding((uint64_t)to, size)) return say(INVALID_VALUE);
    if (stream->capture) return SUCCESS;  // a replay must not undo what stays in its pool
    char* target = inside(to);
    return say(enqueue(stream, [=] { fill(target, pattern, size); }, false));
}
// Where a task finds memory of a device or pinned memory; null if it may not use it.
EXPORT char* simcuda_inside(const void* pointer, size_t size) {
    Lock lock(world.mutex);
    return (is_device(pointer) ? holding((uint64_t)pointer, size) != nullptr : is_pinned(pointer)) ? inside(pointer) : nullptr;
}
// Whether a task that waits for others has to give up.
EXPORT int simcuda_over() { return world.sticky || world.closed; }
EXPORT uint64_t simcuda_shift() { return SHIFT; }
EXPORT uint64_t simcuda_tasks() { return world.tasks; }
EXPORT uint64_t simcuda_allocations() { return world.allocations; }
EXPORT void simcuda_fail_allocation(long nth) { Lock lock(world.mutex); world.settings.fail_allocation = nth; }
EXPORT void simcuda_fail_task(long nth) { Lock lock(world.mutex); world.settings.fail_task = nth; }
EXPORT void simcuda_break(int error) {
    Lock lock(world.mutex);
    world.sticky = error;
    world.moved.notify_all();
}
// The number of the capture that a stream is in, from 1 on; 0 where it is in none.
EXPORT unsigned simcuda_capturing(int device, void* handle) {
    Lock lock(world.mutex);
    auto stream = on_device(device, handle);
    return stream && stream->capture ? stream->capture->id : 0;
}
// Before the interpreter ends: no task begins any more, and the one that runs is waited for.
EXPORT void simcuda_close() {
    world.closed = true;
    {
        Lock lock(world.mutex);
        world.moved.notify_all();
    }
    WithoutGil without;
    for (int i = 0; world.running && i < 5000; i++) usleep(1000);
}
EXPORT void simcuda_unwritten(const char* name) { die("is not written", name); }

// ---- errors, versions, devices

EXPORT int cudaGetLastError() {
    int error = world.sticky ? world.sticky.load() : last;
    last = 0;
    return error;
}
EXPORT int cudaPeekAtLastError() { return world.sticky ? world.sticky.load() : last; }
EXPORT const char* cudaGetErrorName(int error) {
    for (auto& said : SAID) if (said.error == error) return said.name;
    return "unrecognized error code";
}
EXPORT const char* cudaGetErrorString(int error) {
    for (auto& said : SAID) if (said.error == error) return said.text;
    return "unrecognized error code";
}
EXPORT int cudaRuntimeGetVersion(int* version) { *version = 13000; return 0; }
EXPORT int cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
EXPORT int cudaGetDeviceCount(int* count) {
    look();
    *count = (int)world.settings.visible.size();
    THERE();
    return SUCCESS;
}
EXPORT int cudaGetDevice(int* device) { THERE(); *device = current; return SUCCESS; }
static bool exists(int device) { look(); return device >= 0 && device < (int)world.settings.visible.size(); }
EXPORT int cudaSetDevice(int device) {
    THERE();
    if (!exists(device)) return say(INVALID_DEVICE);
    current = device;
    Lock lock(world.mutex);
    world.active[device] = world.begun = true;
    return SUCCESS;
}

// As of CUDA 13; what is left out is 0.
struct Properties {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t total, shared_per_block;
    int registers, warp;
    size_t pitch;
    int threads, block[3], grid[3];
    size_t constants;
    int major, minor;
    size_t alignment, pitch_alignment;
    int processors, integrated, maps_host;
    int textures[39];
    size_t surface_alignment;
    int concurrent, ecc, bus, slot, domain, tcc, engines, unified, bus_width, l2, persisting_l2, threads_per_processor;
    int priorities, global_l1, local_l1;
    size_t shared_per_processor;
    int registers_per_processor, managed, multi, group, atomics, pageable, concurrent_managed, preemption, same_pointer;
    int cooperative;
    size_t shared_optin;
    int host_tables, direct_managed, blocks_per_processor, policy_window;
    size_t reserved_shared;
    int registers_host, sparse, read_only, timeline, pools, rdma;
    unsigned rdma_flush;
    int rdma_order;
    unsigned pool_handles;
    int deferred, ipc_event, cluster, function_pointers, numa_config, numa_id, mps, host_numa;
    unsigned pci_device, pci_subsystem;
    int multinode, reserved[56];
};
EXPORT int cudaGetDeviceProperties(Properties* p, int device) {
    THERE();
    if (!exists(device)) return say(INVALID_DEVICE);
    int physical = world.settings.visible[device];
    memset((void*)p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "simcuda device %d", physical);
    memcpy(p->uuid, uuid_of(physical).data(), 16);
    p->total = world.settings.total;
    p->shared_per_block = 48 << 10;
    p->registers = p->registers_per_processor = 65536;
    p->warp = 32;
    p->pitch = 0x7fffffff;
    p->threads = p->block[0] = p->block[1] = 1024;
    p->block[2] = 64;
    p->grid[0] = 0x7fffffff;
    p->grid[1] = p->grid[2] = 65535;
    p->constants = 65536;
    p->major = 8;
    p->alignment = p->surface_alignment = 512;
    p->pitch_alignment = 32;
    p->processors = 4;
    p->maps_host = p->concurrent = p->unified = p->priorities = p->same_pointer = p->registers_host = p->ipc_event = 1;
    p->bus = physical + 1;
    p->engines = 2;
    p->l2 = 4 << 20;
    p->threads_per_processor = 2048;
    p->shared_per_processor = p->shared_optin = 160 << 10;
    p->blocks_per_processor = 32;
    return SUCCESS;
}
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
    THERE();
    if (!exists(device)) return say(INVALID_DEVICE);
    switch (attribute) {
        case 1: *value = 1024; break;
        case 8: *value = 48 << 10; break;
        case 10: *value = 32; break;
        case 16: *value = 4; break;
        case 39: *value = 2048; break;
        case 75: *value = 8; break;
        case 76: *value = 0; break;
        case 81: case 97: *value = 160 << 10; break;
        case 19: case 41: case 78: case 91: case 99: case 125: *value = 1; break;
        default: *value = 0;
    }
    return SUCCESS;
}
EXPORT int cudaDeviceGetPCIBusId(char* text, int length, int device) {
    READY();
    if (!exists(device)) return say(INVALID_DEVICE);
    snprintf(text, length, "0000:%02x:00.0", world.settings.visible[device] + 1);
    return SUCCESS;
}
EXPORT int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    READY();
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}
EXPORT int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    READY();
    if (!exists(device) || !exists(peer)) return say(INVALID_DEVICE);
    *can = device != peer && world.settings.peers;
    return SUCCESS;
}
EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    READY();
    if (!exists(peer) || peer == current || flags) return say(exists(peer) ? INVALID_VALUE : INVALID_DEVICE);
    Lock lock(world.mutex);
    if (!world.settings.peers) return say(NO_PEER);
    if (world.peer[current][peer]) return say(PEER_ALREADY);
    world.peer[current][peer] = true;
    return SUCCESS;
}
EXPORT int cudaDeviceSynchronize() {
    READY();
    std::vector<Ticket> tickets;
    {
        Lock lock(world.mutex);
        for (auto& capture : world.captures)
            if (capture->origin->device == current) { capture->invalid = true; return say(CAPTURE_UNSUPPORTED); }
        for (auto& [_, stream] : world.streams)
            if (stream->device == current) tickets.push_back({stream, stream->put});
    }
    return say(wait_for("cudaDeviceSynchronize", [&] {
        for (auto& t : tickets) if (t.stream->done < t.number) return false;
        return true;
    }));
}
EXPORT int cudaProfilerStart() { READY(); return SUCCESS; }
EXPORT int cudaProfilerStop() { READY(); return SUCCESS; }

// ---- memory

EXPORT int cudaMemGetInfo(size_t* free, size_t* total) {
    READY();
    Lock lock(world.mutex);
    *total = world.settings.total;
    uint64_t used = used_by_all(world.settings.visible[current], current);
    *free = used < *total ? *total - used : 0;
    return SUCCESS;
}
EXPORT int cudaMalloc(void** pointer, size_t size) {
    READY();
    Lock lock(world.mutex);
    *pointer = nullptr;
    if (int error = unsafe()) return say(error);
    if (!size) return SUCCESS;
    world.allocations++;
    world.active[current] = world.begun = true;
    if (world.settings.fail_allocation && --world.settings.fail_allocation == 0) return say(NO_MEMORY);
    uint64_t taken = (size + GRAIN - 1) / GRAIN * GRAIN;
    if (size > world.settings.total || used_by_all(world.settings.visible[current], current) + taken > world.settings.total)
        return say(NO_MEMORY);
    int fd = memfd_create("simcuda", MFD_CLOEXEC);
    if (fd < 0) return say(NO_MEMORY);
    uint64_t at = room(current, taken);
    if (ftruncate(fd, taken) || !map(at, taken, fd)) {
        close(fd);
        return say(NO_MEMORY);
    }
    fill((void*)(at + SHIFT), PATTERN, taken);
    world.memory[at] = {at, size, taken, current, fd, false, 1, ""};
    world.used[current] += taken;
    note_used(current);
    *pointer = (void*)at;
    return SUCCESS;
}
// Unmaps when all that the device has been given is done.
static void drop(Allocation gone) {
    auto tickets = std::make_shared<std::vector<Ticket>>();
    for (auto& [_, stream] : world.streams) tickets->push_back({stream, stream->put});
    auto reaper = start(gone.device, false, 0);
    put(reaper, [=] {
        stand([&] {
            for (auto& t : *tickets) if (t.stream->done < t.number) return false;
            return true;
        }, false);
        if (!gone.imported) fill((void*)(gone.address + SHIFT), PATTERN, gone.taken);  // who has it mapped sees that
        munmap((void*)gone.address, gone.taken);
        munmap((void*)(gone.address + SHIFT), gone.taken);
        close(gone.fd);
    }, false);
    reaper->ending = true;
    world.streams.erase(reaper.get());
}
EXPORT int cudaFree(void* pointer) {
    READY();
    if (!pointer) return SUCCESS;
    Lock lock(world.mutex);
    if (int error = unsafe()) return say(error);
    auto it = world.memory.find((uint64_t)pointer);
    if (it == world.memory.end() || it->second.imported) return say(INVALID_VALUE);
    Allocation gone = it->second;
    world.memory.erase(it);
    world.used[gone.device] -= gone.taken;
    note_used(gone.device);
    drop(gone);
    return SUCCESS;
}
EXPORT int cudaHostAlloc(void** pointer, size_t size, unsigned) {
    READY();
    Lock lock(world.mutex);
    if (int error = unsafe()) return say(error);
    *pointer = nullptr;
    if (!size) return SUCCESS;
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return say(NO_MEMORY);
    fill(at, PATTERN, size);
    world.pinned[(uint64_t)at] = {size, false};
    *pointer = at;
    return SUCCESS;
}
EXPORT int cudaFreeHost(void* pointer) {
    READY();
    if (!pointer) return SUCCESS;
    std::vector<Ticket> tickets;
    uint64_t size;
    {
        Lock lock(world.mutex);
        auto it = world.pinned.find((uint64_t)pointer);
        if (it == world.pinned.end() || it->second.second) return say(INVALID_VALUE);
        size = it->second.first;
        world.pinned.erase(it);
        // as cudaFree, on a thread of its own: a copy that still runs must not end the process
        for (auto& [_, stream] : world.streams) tickets.push_back({stream, stream->put});
        auto reaper = start(current, false, 0);
        put(reaper, [=] {
            stand([&] {
                for (auto& t : tickets) if (t.stream->done < t.number) return false;
                return true;
            }, false);
            munmap(pointer, size);
        }, false);
        reaper->ending = true;
        world.streams.erase(reaper.get());
    }
    return SUCCESS;
}
EXPORT int cudaHostRegister(void* pointer, size_t size, unsigned) {
    READY();
    Lock lock(world.mutex);
    if (!pointer || !size) return say(INVALID_VALUE);
    auto it = world.pinned.lower_bound((uint64_t)pointer + size);
    if (it != world.pinned.begin() && std::prev(it)->first + std::prev(it)->second.first > (uint64_t)pointer)
        return say(REGISTERED_ALREADY);
    world.pinned[(uint64_t)pointer] = {size, true};
    return SUCCESS;
}
EXPORT int cudaHostUnregister(void* pointer) {
    READY();
    Lock lock(world.mutex);
    auto it = world.pinned.find((uint64_t)pointer);
    if (it == world.pinned.end() || !it->second.second) return say(NOT_REGISTERED);
    world.pinned.erase(it);
    return SUCCESS;
}
struct PointerAttributes { int type, device; void *on_device, *on_host; long reserved[8]; };
EXPORT int cudaPointerGetAttributes(PointerAttributes* told, const void* pointer) {
    READY();
    Lock lock(world.mutex);
    memset((void*)told, 0, sizeof *told);
    if (Allocation* a = is_device(pointer) ? holding((uint64_t)pointer) : nullptr)
        *told = {2, a->device, (void*)pointer, nullptr, {}};
    else if (is_pinned(pointer)) *told = {1, current, (void*)pointer, (void*)pointer, {}};
    else *told = {0, -2, nullptr, (void*)pointer, {}};
    return SUCCESS;
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void* stream) {
    return copy(to, from, size, stream, false, "cudaMemcpyAsync");
}
EXPORT int cudaMemcpy(void* to, const void* from, size_t size, int) {
    return copy(to, from, size, nullptr, true, "cudaMemcpy");
}
EXPORT int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
    return copy(to, from, size, stream, false, "cudaMemcpyPeerAsync");
}
EXPORT int cudaMemsetAsync(void* to, int value, size_t size, void* stream) { return set(to, value, size, stream); }
EXPORT int cudaMemset(void* to, int value, size_t size) { return set(to, value, size, nullptr); }

// ---- memory and events of other processes

EXPORT int cudaIpcGetMemHandle(void* handle, void* pointer) {
    READY();
    Lock lock(world.mutex);
    Allocation* a = holding((uint64_t)pointer);
    if (!a || a->imported) return say(INVALID_VALUE);
    Handle h = {"simcuda", getpid(), a->fd, world.settings.visible[a->device], a->size, a->address, 0};
    struct stat status;
    fstat(a->fd, &status);
    h.id = status.st_ino;
    memset(handle, 0, 64);
    memcpy(handle, &h, sizeof h);
    return SUCCESS;
}
static int open_of(const Handle& h, const char* sign) {
    if (memcmp(h.sign, sign, strlen(sign) + 1)) return -1;
    std::string path = "/proc/" + std::to_string(h.pid) + "/fd/" + std::to_string(h.fd);
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd >= 0 && (fstat(fd, &status) || status.st_ino != h.id)) {  // another file by now
        close(fd);
        return -1;
    }
    return fd;
}
struct Bytes64 { char bytes[64]; };
EXPORT int cudaIpcOpenMemHandle(void** pointer, Bytes64 handle, unsigned) {
    READY();
    Handle h;
    memcpy(&h, handle.bytes, sizeof h);
    Lock lock(world.mutex);
    std::string key(handle.bytes, 64);
    for (auto& [at, a] : world.memory)
        if (a.imported && a.handle == key) {
            a.uses++;
            *pointer = (void*)at;
            return SUCCESS;
        }
    if (h.pid == getpid()) return say(UNINITIALIZED_DEVICE);
    if (world.settings.visible[current] != h.physical && !world.settings.peers) return say(NO_PEER);
    int fd = open_of(h, "simcuda");
    if (fd < 0) return say(INVALID_HANDLE);
    uint64_t taken = (h.size + GRAIN - 1) / GRAIN * GRAIN, at = room(current, taken);
    if (!map(at, taken, fd)) {
        close(fd);
        return say(MAP_FAILED_);
    }
    world.active[current] = world.begun = true;
    world.memory[at] = {at, h.size, taken, current, fd, true, 1, key};
    *pointer = (void*)at;
    return SUCCESS;
}
EXPORT int cudaIpcCloseMemHandle(void* pointer) {
    READY();
    Lock lock(world.mutex);
    auto it = world.memory.find((uint64_t)pointer);
    if (it == world.memory.end() || !it->second.imported) return say(INVALID_VALUE);
    if (--it->second.uses) return SUCCESS;
    Allocation gone = it->second;
    world.memory.erase(it);
    drop(gone);
    return SUCCESS;
}

// ---- streams

EXPORT int cudaStreamCreateWithPriority(void** handle, unsigned flags, int priority) {
    READY();
    Lock lock(world.mutex);
    *handle = start(current, !(flags & 1), priority).get();
    return SUCCESS;
}
EXPORT int cudaStreamCreateWithFlags(void** handle, unsigned flags) { return cudaStreamCreateWithPriority(handle, flags, 0); }
EXPORT int cudaStreamCreate(void** handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORT int cudaStreamDestroy(void* handle) {
    READY();
    Lock lock(world.mutex);
    auto it = world.streams.find((Stream*)handle);
    if (it == world.streams.end()) return say(INVALID_HANDLE);
    it->second->ending = true;  // what it has been given is still done
    it->second->any.notify_one();
    world.streams.erase(it);
    return SUCCESS;
}
EXPORT int cudaStreamGetPriority(void* handle, int* priority) {
    READY();
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    *priority = stream->priority;
    return SUCCESS;
}
EXPORT int cudaStreamSynchronize(void* handle) {
    READY();
    std::shared_ptr<Stream> stream;
    uint64_t number;
    std::vector<Ticket> others;
    {
        Lock lock(world.mutex);
        stream = found(handle);
        if (!stream) return say(INVALID_HANDLE);
        if (stream->capture) { stream->capture->invalid = true; return say(CAPTURE_UNSUPPORTED); }
        number = stream->put;
        if (stream == world.legacy[stream->device])  // its work includes that of the blocking ones
            for (auto& [_, other] : world.streams)
                if (other->device == stream->device && other->blocking) others.push_back({other, other->put});
    }
    return say(wait_for("cudaStreamSynchronize", [&] {
        for (auto& t : others) if (t.stream->done < t.number) return false;
        return stream->done >= number;
    }));
}
EXPORT int cudaStreamQuery(void* handle) {
    READY();
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    if (stream->capture) { stream->capture->invalid = true; return say(CAPTURE_UNSUPPORTED); }
    return stream->done < stream->put ? NOT_READY : SUCCESS;
}
EXPORT int cudaLaunchHostFunc(void* handle, void (*call)(void*), void* data) {
    READY();
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    return say(enqueue(stream, [=] { call(data); }));
}
EXPORT int cudaStreamAddCallback(void* handle, void (*call)(void*, int, void*), void* data, unsigned) {
    READY();
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    return say(enqueue(stream, [=] { call(handle, 0, data); }));
}

// ---- events

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static std::shared_ptr<Event> event_of(void* handle) {
    auto it = world.events.find((Event*)handle);
    return it == world.events.end() ? nullptr : it->second;
}
EXPORT int cudaEventCreateWithFlags(void** handle, unsigned flags) {
    READY();
    auto event = std::make_shared<Event>();
    event->timing = !(flags & 2);
    event->shared = flags & 4;
    if (event->shared && event->timing) return say(INVALID_VALUE);
    if (event->shared) {
        event->fd = memfd_create("simcuda event", MFD_CLOEXEC);
        if (event->fd < 0 || ftruncate(event->fd, 4096)) return say(NO_MEMORY);
        void* at = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, event->fd, 0);
        if (at == MAP_FAILED) return say(NO_MEMORY);
        event->moment = (Moment*)at;
    } else event->moment = new Moment{};
    Lock lock(world.mutex);
    world.begun = world.active[current] = true;
    world.events[event.get()] = event;
    *handle = event.get();
    return SUCCESS;
}
EXPORT int cudaEventCreate(void** handle) { return cudaEventCreateWithFlags(handle, 0); }
EXPORT int cudaEventDestroy(void* handle) {
    READY();
    Lock lock(world.mutex);
    return say(world.events.erase((Event*)handle) ? SUCCESS : INVALID_HANDLE);
}
EXPORT int cudaEventRecordWithFlags(void* handle, void* on, unsigned flags) {
    READY();
    Lock lock(world.mutex);
    auto event = event_of(handle);
    auto stream = found(on);
    if (!event || !stream) return say(INVALID_HANDLE);
    if (stream->capture && !(flags & 1)) {
        event->capture = stream->capture;
        event->joins = {stream.get()};
        return SUCCESS;
    }
    event->capture = nullptr;
    uint64_t version = ++event->moment->recorded;
    return say(enqueue(stream, [=] {
        event->moment->time = now();
        uint64_t before = event->moment->done;
        while (before < version && !event->moment->done.compare_exchange_weak(before, version)) {}
    }, false));
}
EXPORT int cudaEventRecord(void* handle, void* on) { return cudaEventRecordWithFlags(handle, on, 0); }
EXPORT int cudaStreamWaitEvent(void* on, void* handle, unsigned) {
    READY();
    Lock lock(world.mutex);
    auto event = event_of(handle);
    auto stream = found(on);
    if (!event || !stream) return say(INVALID_HANDLE);
    if (event->capture) {
        auto capture = event->capture;
        bool open = false;
        for (auto& other : world.captures) open |= other == capture;
        if (stream->capture && stream->capture != capture) {
            stream->capture->invalid = capture->invalid = true;
            return say(open ? CAPTURE_MERGE : CAPTURE_ISOLATION);
        }
        if (!open) return say(CAPTURED_EVENT);
        if (!stream->capture) {
            stream->capture = capture;
            capture->streams.insert(stream.get());
            capture->unjoined.insert(stream.get());
        }
        for (Stream* joined : event->joins) capture->unjoined.erase(joined);
        if (stream.get() != capture->origin) capture->unjoined.insert(stream.get());
        return SUCCESS;
    }
    if (stream->capture && !event->moment->recorded) return SUCCESS;
    if (stream->capture) { stream->capture->invalid = true; return say(CAPTURE_ISOLATION); }
    uint64_t version = event->moment->recorded;
    if (event->moment->done >= version) return SUCCESS;
    bool shared = event->shared;
    return say(enqueue(stream, [=] { stand([&] { return event->moment->done >= version; }, shared); }, false));
}
EXPORT int cudaEventQuery(void* handle) {
    READY();
    Lock lock(world.mutex);
    auto event = event_of(handle);
    if (!event) return say(INVALID_HANDLE);
    if (event->capture) return say(waits_for_captured(event->capture));
    if (int error = unsafe()) return say(error);
    return event->moment->done < event->moment->recorded ? NOT_READY : SUCCESS;
}
EXPORT int cudaEventSynchronize(void* handle) {
    READY();
    std::shared_ptr<Event> event;
    uint64_t version;
    {
        Lock lock(world.mutex);
        event = event_of(handle);
        if (!event) return say(INVALID_HANDLE);
        if (event->capture) return say(waits_for_captured(event->capture));
        version = event->moment->recorded;
    }
    if (event->moment->done >= version) return SUCCESS;
    return say(wait_for("cudaEventSynchronize", [&] { return event->moment->done >= version; }, event->shared));
}
EXPORT int cudaEventElapsedTime(float* ms, void* from, void* to) {
    READY();
    Lock lock(world.mutex);
    auto a = event_of(from), b = event_of(to);
    if (!a || !b || !a->timing || !b->timing || !a->moment->recorded || !b->moment->recorded) return say(INVALID_HANDLE);
    for (auto& e : {a, b})
        if (e->moment->done < e->moment->recorded) return NOT_READY;
    *ms = float(b->moment->time - a->moment->time);
    return SUCCESS;
}
EXPORT int cudaIpcGetEventHandle(void* handle, void* of) {
    READY();
    Lock lock(world.mutex);
    auto event = event_of(of);
    if (!event || !event->shared) return say(INVALID_HANDLE);
    Handle h = {"simevnt", getpid(), event->fd, 0, 0, 0, 0};
    struct stat status;
    fstat(event->fd, &status);
    h.id = status.st_ino;
    memset(handle, 0, 64);
    memcpy(handle, &h, sizeof h);
    return SUCCESS;
}
EXPORT int cudaIpcOpenEventHandle(void** handle, Bytes64 of) {
    READY();
    Handle h;
    memcpy(&h, of.bytes, sizeof h);
    if (h.pid == getpid()) return say(UNINITIALIZED_DEVICE);
    int fd = open_of(h, "simevnt");
    if (fd < 0) return say(INVALID_HANDLE);
    void* at = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return say(MAP_FAILED_);
    auto event = std::make_shared<Event>();
    event->timing = false;
    event->shared = true;
    event->moment = (Moment*)at;
    Lock lock(world.mutex);
    world.events[event.get()] = event;
    *handle = event.get();
    return SUCCESS;
}

// ---- graphs: what is captured is a list in the order of its issue, which a launch gives the stream

EXPORT int cudaStreamBeginCapture(void* handle, int mode) {
    READY();
    Lock lock(world.mutex);
    if ((uintptr_t)handle <= 1) return say(CAPTURE_UNSUPPORTED);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    if (stream->capture) return say(CAPTURE_UNSUPPORTED);
    auto capture = std::make_shared<Capture>();
    capture->id = ++world.captured;
    capture->graph = new Graph;
    capture->origin = stream.get();
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->streams = {stream.get()};
    world.graphs.insert(capture->graph);
    world.captures.push_back(capture);
    stream->capture = capture;
    return SUCCESS;
}
EXPORT int cudaStreamEndCapture(void* handle, void** graph) {
    READY();
    Lock lock(world.mutex);
    *graph = nullptr;
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    auto capture = stream->capture;
    if (!capture) return say(INVALID_VALUE);
    if (capture->origin != stream.get()) return say(CAPTURE_UNMATCHED);
    if (capture->mode != 2 && !pthread_equal(capture->thread, pthread_self())) return say(CAPTURE_WRONG_THREAD);
    for (Stream* one : capture->streams) {
        auto it = world.streams.find(one);
        if (it != world.streams.end()) it->second->capture = nullptr;
    }
    for (auto it = world.captures.begin(); it != world.captures.end(); ++it)
        if (*it == capture) { world.captures.erase(it); break; }
    int error = capture->invalid ? CAPTURE_INVALIDATED : capture->unjoined.empty() ? SUCCESS : CAPTURE_UNJOINED;
    if (error) {
        world.graphs.erase(capture->graph);
        delete capture->graph;
        return say(error);
    }
    *graph = capture->graph;
    return SUCCESS;
}
EXPORT int cudaStreamIsCapturing(void* handle, int* status) {
    READY();
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return SUCCESS;
}
EXPORT int cudaStreamGetCaptureInfo(void* handle, int* status, unsigned long long* id, void** graph, void** before,
                                    void** edges, size_t* count) {
    READY();
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream) return say(INVALID_HANDLE);
    auto& capture = stream->capture;
    *status = !capture ? 0 : capture->invalid ? 2 : 1;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? capture->graph : nullptr;
    if (before) *before = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return SUCCESS;
}
EXPORT int cudaThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return SUCCESS;
}
EXPORT int cudaGraphGetNodes(Graph* graph, void** nodes, size_t* count) {
    READY();
    Lock lock(world.mutex);
    if (!world.graphs.count(graph)) return say(INVALID_VALUE);
    if (nodes) die("of nodes, not their number", "cudaGraphGetNodes");
    *count = graph->nodes.size();
    return SUCCESS;
}
EXPORT int cudaGraphInstantiateWithFlags(Graph** made, Graph* graph, unsigned long long) {
    READY();
    Lock lock(world.mutex);
    if (!world.graphs.count(graph)) return say(INVALID_VALUE);
    *made = new Graph(*graph);
    world.graphs.insert(*made);
    return SUCCESS;
}
EXPORT int cudaGraphLaunch(Graph* graph, void* handle) {
    READY();
    Lock lock(world.mutex);
    auto stream = found(handle);
    if (!stream || !world.graphs.count(graph)) return say(stream ? INVALID_VALUE : INVALID_HANDLE);
    for (auto& task : graph->nodes)
        if (int error = enqueue(stream, task.run, task.delayed)) return say(error);
    return SUCCESS;
}
EXPORT int cudaGraphDestroy(Graph* graph) {
    READY();
    Lock lock(world.mutex);
    if (!world.graphs.erase(graph)) return say(INVALID_VALUE);
    delete graph;
    return SUCCESS;
}
EXPORT int cudaGraphExecDestroy(Graph* graph) { return cudaGraphDestroy(graph); }

// ---- kernels: their names are noted, and a launch of one aborts with it

struct Dim { unsigned x, y, z; };
EXPORT void** __cudaRegisterFatBinary(void*) { static void* one; return &one; }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
    kernels[host] = name;
}
static std::string kernel_name(const void* host) {
    auto it = kernels.find(host);
    if (it == kernels.end()) return "a kernel that nobody has registered";
    int status;
    char* plain = abi::__cxa_demangle(it->second, nullptr, nullptr, &status);
    std::string name = plain ? plain : it->second;
    free(plain);
    return name;
}
static int launch(const void* kernel, void** arguments, void* stream, const char* by) {
    READY();
    std::string name = kernel_name(kernel);
    if (name.find("spin_kernel(") != std::string::npos) {  // torch.cuda._sleep: it computes nothing, and takes its time
        double cycles = (double)*(int64_t*)arguments[0];
        Lock lock(world.mutex);
        auto on = found(stream);
        if (!on) return say(INVALID_HANDLE);
        return say(enqueue(on, [=] { usleep((useconds_t)(cycles / 1e3)); }));
    }
    std::string what = "a launch of " + name + ", which nobody has replaced";
    die(what.c_str(), by);
}
EXPORT int __cudaGetKernel(const void** kernel, const void* host) { *kernel = host; return SUCCESS; }
EXPORT int __cudaLaunchKernel(const void* kernel, Dim, Dim, void** arguments, size_t, void* stream) {
    return launch(kernel, arguments, stream, "cudaLaunchKernel");
}
EXPORT int cudaLaunchKernel(const void* kernel, Dim, Dim, void** arguments, size_t, void* stream) {
    return launch(kernel, arguments, stream, "cudaLaunchKernel");
}
EXPORT int cudaLaunchCooperativeKernel(const void* kernel, Dim, Dim, void** arguments, size_t, void* stream) {
    return launch(kernel, arguments, stream, "cudaLaunchCooperativeKernel");
}
EXPORT int cudaLaunchKernelExC(const void*, const void* kernel, void** arguments) {
    return launch(kernel, arguments, nullptr, "cudaLaunchKernelExC");
}
static thread_local std::vector<std::tuple<Dim, Dim, size_t, void*>> configurations;
EXPORT unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
EXPORT int __cudaPopCallConfiguration(Dim* grid, Dim* block, size_t* shared, void** stream) {
    if (configurations.empty()) return say(INVALID_VALUE);
    std::tie(*grid, *block, *shared, *stream) = configurations.back();
    configurations.pop_back();
    return SUCCESS;
}

// ---- the driver

EXPORT int cuDeviceGet(int* device, int ordinal) {
    if (!exists(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    if (!exists(device)) return INVALID_DEVICE;
    *flags = 0;
    Lock lock(world.mutex);
    *active = world.active[device];
    return SUCCESS;
}
EXPORT int cuGetErrorString(int error, const char** text) { *text = cudaGetErrorString(error); return SUCCESS; }
EXPORT int cuMemGetAddressRange(uint64_t* base, size_t* size, uint64_t pointer) {
    Lock lock(world.mutex);
    Allocation* a = holding(pointer);
    if (!a) return INVALID_VALUE;
    if (base) *base = a->address;
    if (size) *size = a->size;
    return SUCCESS;
}
EXPORT int cuMemGetAddressRange_v2(uint64_t* base, size_t* size, uint64_t pointer) { return cuMemGetAddressRange(base, size, pointer); }

// What the driver has and this has not gets a few bytes of code that abort with the name.
EXPORT int cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long, int* status) {
    static void* self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);  // this library's own name
    *entry = self ? dlsym(self, name) : nullptr;
    if (!*entry) {
        unsigned char* code = (unsigned char*)mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if ((void*)code == MAP_FAILED) return say(NO_MEMORY);
        const char* kept = strdup(name);
        void (*call)(const char*) = simcuda_unwritten;
        unsigned char text[] = {0x48, 0xBF, 0, 0, 0, 0, 0, 0, 0, 0, 0x48, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xE0};
        memcpy(text + 2, &kept, 8);   // mov rdi, name
        memcpy(text + 12, &call, 8);  // mov rax, simcuda_unwritten; jmp rax
        memcpy(code, text, sizeof text);
        *entry = code;
    }
    if (status) *status = 0;
    return SUCCESS;
}
