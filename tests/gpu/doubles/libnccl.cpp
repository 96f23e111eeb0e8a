// A double of libnccl.so.2 on top of the double of libcuda: messages are files in a directory that the unique id names, so
// ranks may be threads or processes.
//
// Strict: what ranks send each other carries its kind, count, type, operation and number, and a rank that gets something else
// than it asked for finds an error in the background (5), as NCCL does at best. Outside of a group a send waits for its
// receiver, so an exchange that is not grouped stands still. A communicator that does not block takes a group of calls only
// when its state is asked for, and says that it is in progress until then: whoever goes on without asking loses his calls.
//
//   FAKENCCL_FAIL=f:n:code    the n-th call of the function f gives this error; f = "work": the n-th piece of work fails so
//                             in the background; with FAKENCCL_FAIL_RANK=r on one rank only
//   FAKENCCL_FOLDER=path      where messages go, /dev/shm if nowhere; whoever sets it removes them
//   FAKENCCL_VERSION=v        what it says of itself
//   FAKENCCL_REPORT=1         at the end, on standard error: what leaked, and how often what was called
#include "double.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

enum : int { OK = 0, UNHANDLED_CUDA = 1, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
extern "C" int cuCtxGetCurrent(void **context);

struct Id { char text[128]; };
struct Config { size_t size; unsigned magic, version; int blocking; };
enum Kind { ALL_REDUCE = 1, BROADCAST, SEND, RECV };
static const char *const NAMES[] = {"", "ncclAllReduce", "ncclBroadcast", "ncclSend", "ncclRecv"};

// One call, and what a message says of the call that it belongs to.
struct Comm;
struct Call { Kind kind; const void *from; void *to; size_t count; int type, op, peer; void *stream; bool grouped; };
struct Head { uint32_t kind, type, op, root; uint64_t count, number; };

struct Comm {
    std::string directory;
    int size, rank;
    bool blocks;
    std::atomic<int> state{OK};  // as ncclCommGetAsyncError tells it
    std::atomic<bool> aborted{false};
    std::mutex mutex;            // over what follows: work on several streams, and who asks for the state
    std::vector<Call> asked;     // a group that has not been taken yet
    std::mutex line;             // one piece of work at a time: numbers are in order
    std::map<int, uint64_t> sent, received;
    uint64_t collectives = 0;
    std::string words;           // for ncclGetLastError
};

struct World {
    std::mutex mutex;
    std::map<Comm *, std::shared_ptr<Comm>> alive;
    std::map<std::string, long> counts;
    ~World() {
        if (!getenv("FAKENCCL_REPORT")) return;
        fprintf(stderr, "libnccl double: leaked communicators=%zu; counts:", alive.size());
        for (auto &count : counts) fprintf(stderr, " %s=%ld", count.first.c_str(), count.second);
        fprintf(stderr, "\n");
    }
};
static World world;
static thread_local int depth;
static thread_local std::vector<std::pair<std::shared_ptr<Comm>, Call>> grouped;
typedef std::lock_guard<std::mutex> Lock;

// Counts a call; the error that it is to give, if any.
static int begin(const char *name, int rank = -1) {
    Lock lock(world.mutex);
    const long number = ++world.counts[name];
    static const char *fail = getenv("FAKENCCL_FAIL"), *only = getenv("FAKENCCL_FAIL_RANK");
    char which[64];
    int at, code;
    const bool here = !only || rank < 0 || atoi(only) == rank;
    return fail && here && sscanf(fail, "%63[^:]:%d:%d", which, &at, &code) == 3 && !strcmp(which, name) && at == number ? code : OK;
}
static std::shared_ptr<Comm> find(Comm *handle) {
    Lock lock(world.mutex);
    auto found = world.alive.find(handle);
    return found == world.alive.end() ? nullptr : found->second;
}
static void fail(Comm &comm, int code, const std::string &words) {
    {
        Lock lock(comm.mutex);
        if (comm.words.empty()) comm.words = words;
    }
    int expected = OK;
    comm.state.compare_exchange_strong(expected, code);
}
static bool is_over(const Comm &comm) { return comm.aborted || (comm.state != OK && comm.state != IN_PROGRESS); }
static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < 10 ? sizes[type] : 0;
}

// Waits until a file is there, or gone. Nobody waits for ever: an abort ends it.
static bool await(Comm &comm, const std::string &path, bool there) {
    fakecuda_waiting(1);
    bool came;
    while (!(came = (access(path.c_str(), F_OK) == 0) == there) && !is_over(comm)) usleep(200);
    fakecuda_waiting(0);
    return came;
}
static std::string path(const Comm &comm, int from, int to, uint64_t number) {
    return comm.directory + "/" + std::to_string(from) + "_" + std::to_string(to) + "_" + std::to_string(number);
}
static void put(Comm &comm, int to, const Head &head, const void *data, size_t bytes, bool waits) {
    const std::string name = path(comm, comm.rank, to, comm.sent[to]++);
    FILE *file = fopen((name + ".part").c_str(), "wb");
    if (!file) return fail(comm, SYSTEM, "a message cannot be written");
    fwrite(&head, sizeof head, 1, file);
    fwrite(data, 1, bytes, file);
    fclose(file);
    rename((name + ".part").c_str(), name.c_str());
    if (waits && to != comm.rank) await(comm, name, false);
}
static bool get(Comm &comm, int from, const Head &head, void *data, size_t bytes) {
    const std::string name = path(comm, from, comm.rank, comm.received[from]++);
    if (!await(comm, name, true)) return false;
    FILE *file = fopen(name.c_str(), "rb");
    if (!file) return fail(comm, SYSTEM, "a message cannot be read"), false;
    Head other{};
    bool same = fread(&other, sizeof other, 1, file) == 1 && !memcmp(&other, &head, sizeof head);
    same = same && fread(data, 1, bytes, file) == bytes;
    fclose(file);
    unlink(name.c_str());
    if (same) return true;
    char words[200];
    snprintf(words, sizeof words, "rank %d is in %s of %llu, rank %d in %s of %llu", comm.rank, NAMES[head.kind],
             (unsigned long long)head.count, from, other.kind <= RECV ? NAMES[other.kind] : "?", (unsigned long long)other.count);
    fail(comm, INVALID_USAGE, words);
    return false;
}

static float wide(uint16_t bits, bool brain) {
    if (brain) { uint32_t wide = (uint32_t)bits << 16; float x; memcpy(&x, &wide, 4); return x; }
    _Float16 half; memcpy(&half, &bits, 2); return half;
}
static uint16_t narrow(float x, bool brain) {
    if (brain) { uint32_t bits; memcpy(&bits, &x, 4); return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }
    _Float16 half = x; uint16_t bits; memcpy(&bits, &half, 2); return bits;
}
template <class T> static T combine(int op, T a, T b) {
    return op == 1 ? a * b : op == 2 ? (a > b ? a : b) : op == 3 ? (a < b ? a : b) : a + b;
}
template <class T> static void fold(void *into, const void *other, size_t count, int op) {
    for (size_t i = 0; i < count; ++i) ((T *)into)[i] = combine(op, ((T *)into)[i], ((const T *)other)[i]);
}
static void reduce(int type, int op, void *into, const void *other, size_t count) {
    switch (type) {
    case 0: return fold<int8_t>(into, other, count, op);
    case 1: return fold<uint8_t>(into, other, count, op);
    case 2: return fold<int32_t>(into, other, count, op);
    case 3: return fold<uint32_t>(into, other, count, op);
    case 4: return fold<int64_t>(into, other, count, op);
    case 5: return fold<uint64_t>(into, other, count, op);
    case 7: return fold<float>(into, other, count, op);
    case 8: return fold<double>(into, other, count, op);
    default:
        for (size_t i = 0; i < count; ++i) {
            uint16_t &at = ((uint16_t *)into)[i];
            at = narrow(combine(op, wide(at, type == 9), wide(((const uint16_t *)other)[i], type == 9)), type == 9);
        }
    }
}
static void divide(int type, void *values, size_t count, int by) {
    for (size_t i = 0; i < count; ++i)
        if (type == 7) ((float *)values)[i] /= by;
        else if (type == 8) ((double *)values)[i] /= by;
        else { uint16_t &at = ((uint16_t *)values)[i]; at = narrow(wide(at, type == 9) / by, type == 9); }
}

// Does one call, on the thread of its stream.
static void work(Comm &comm, const Call &call) {
    Lock lock(comm.line);
    if (int code = begin("work", comm.rank)) fail(comm, code, "the double was asked to fail");
    if (is_over(comm)) return;
    const size_t bytes = call.count * size_of(call.type);
    const bool between_two = call.kind == SEND || call.kind == RECV;
    const Head head{between_two ? (uint32_t)SEND : (uint32_t)call.kind, (uint32_t)call.type, (uint32_t)call.op,
                    between_two ? 0u : (uint32_t)call.peer, call.count, between_two ? 0 : comm.collectives++};
    if (call.kind == SEND) return put(comm, call.peer, head, call.from, bytes, !call.grouped);
    if (call.kind == RECV) { get(comm, call.peer, head, call.to, bytes); return; }
    if (call.kind == BROADCAST) {
        if (comm.rank != call.peer) { get(comm, call.peer, head, call.to, bytes); return; }
        for (int rank = 0; rank < comm.size; ++rank)
            if (rank != comm.rank) put(comm, rank, head, call.from, bytes, false);
        return;
    }
    for (int rank = 0; rank < comm.size; ++rank) put(comm, rank, head, call.from, bytes, false);
    std::vector<char> sum(bytes), other(bytes);
    for (int rank = 0; rank < comm.size; ++rank) {
        if (!get(comm, rank, head, rank == 0 ? sum.data() : other.data(), bytes)) return;
        if (rank > 0) reduce(call.type, call.op, sum.data(), other.data(), call.count);
    }
    if (call.op == 4) divide(call.type, sum.data(), call.count, comm.size);
    memcpy(call.to, sum.data(), bytes);
}

// Work of a communicator that has failed stands on its stream until somebody gives it up, as kernels of NCCL do.
static void stand(Comm &comm) {
    fakecuda_waiting(1);
    while (is_over(comm) && !comm.aborted) usleep(200);
    fakecuda_waiting(0);
}

// Enqueues the calls of a group: on each stream all sends first, so that they go on at once.
static int submit(const std::shared_ptr<Comm> &comm, std::vector<Call> calls) {
    std::map<void *, std::vector<Call>> streams;
    for (bool receives : {false, true})
        for (Call &call : calls)
            if ((call.kind == RECV) == receives) streams[call.stream].push_back(call);
    for (auto &stream : streams) {
        typedef std::pair<std::shared_ptr<Comm>, std::vector<Call>> Batch;
        auto run = [](void *argument) {
            std::unique_ptr<Batch> batch((Batch *)argument);
            for (Call &call : batch->second) work(*batch->first, call);
            stand(*batch->first);
        };
        auto *batch = new Batch(comm, stream.second);
        if (fakecuda_push(stream.first, run, batch)) { delete batch; return UNHANDLED_CUDA; }
    }
    return OK;
}

static int enqueue(Kind kind, Comm *handle, const void *from, void *to, size_t count, int type, int op, int peer, void *stream) {
    auto comm = find(handle);
    if (!comm) return INVALID_ARGUMENT;
    if (int code = begin(NAMES[kind], comm->rank)) return code;
    void *context = nullptr;
    if (cuCtxGetCurrent(&context) || !context) return UNHANDLED_CUDA;
    if (is_over(*comm) || !size_of(type) || peer < 0 || peer >= comm->size) return INVALID_ARGUMENT;
    const size_t bytes = count * size_of(type);
    Call call{kind, nullptr, nullptr, count, type, op, peer, stream, depth > 0};
    if (kind != RECV && bytes && !(call.from = fakecuda_host((uint64_t)from, bytes))) return INVALID_ARGUMENT;
    if (kind != SEND && bytes && !(call.to = fakecuda_host((uint64_t)to, bytes))) return INVALID_ARGUMENT;
    if (depth) { grouped.emplace_back(comm, call); return OK; }
    return submit(comm, {call});
}

extern "C" {
int ncclGetVersion(int *version) {
    const char *text = getenv("FAKENCCL_VERSION");
    *version = text ? atoi(text) : 22005;
    return OK;
}
const char *ncclGetErrorString(int code) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                        "in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown";
}
const char *ncclGetLastError(Comm *handle) {
    static thread_local std::string words;
    auto comm = find(handle);
    if (comm) { Lock lock(comm->mutex); words = comm->words; }
    return comm ? words.c_str() : "";
}
int ncclGetUniqueId(Id *id) {
    if (int code = begin(__func__)) return code;
    std::random_device random;
    memset(id, 0, sizeof *id);
    const char *folder = getenv("FAKENCCL_FOLDER");
    snprintf(id->text, sizeof id->text, "%s/fakenccl_%08x%08x", folder ? folder : "/dev/shm", random(), random());
    return mkdir(id->text, 0700) ? SYSTEM : OK;
}
int ncclCommInitRankConfig(Comm **handle, int size, Id id, int rank, Config *config) {
    if (int code = begin(__func__, rank)) return code;
    void *context = nullptr;
    if (cuCtxGetCurrent(&context) || !context) return UNHANDLED_CUDA;
    if (rank < 0 || rank >= size || !config || config->magic != 0xcafebeef) return INVALID_ARGUMENT;
    auto comm = std::make_shared<Comm>();
    comm->directory = id.text, comm->size = size, comm->rank = rank, comm->blocks = config->blocking != 0;
    {
        Lock lock(world.mutex);
        world.alive[comm.get()] = comm;
    }
    *handle = comm.get();
    comm->state = IN_PROGRESS;
    auto meet = [comm] {
        close(open(path(*comm, comm->rank, -1, 0).c_str(), O_CREAT | O_WRONLY, 0600));
        for (int rank = 0; rank < comm->size; ++rank)
            if (!await(*comm, path(*comm, rank, -1, 0), true)) return;
        int expected = IN_PROGRESS;
        comm->state.compare_exchange_strong(expected, OK);
    };
    if (comm->blocks) { meet(); return comm->state; }
    std::thread(meet).detach();
    return IN_PROGRESS;
}
int ncclCommFinalize(Comm *handle) { return find(handle) ? begin(__func__) : INVALID_ARGUMENT; }
static int forget(Comm *handle, bool aborts) {
    auto comm = find(handle);
    if (!comm) return INVALID_ARGUMENT;
    if (aborts || is_over(*comm)) comm->aborted = true;
    Lock lock(world.mutex);
    world.alive.erase(handle);
    return OK;
}
int ncclCommDestroy(Comm *handle) { begin(__func__); return forget(handle, false); }
int ncclCommAbort(Comm *handle) { begin(__func__); return forget(handle, true); }
int ncclCommGetAsyncError(Comm *handle, int *state) {
    auto comm = find(handle);
    if (!comm) return INVALID_ARGUMENT;
    std::vector<Call> asked;
    {
        Lock lock(comm->mutex);
        asked.swap(comm->asked);
    }
    // taken now, and said so the next time
    *state = asked.empty() ? comm->state.load() : IN_PROGRESS;
    if (!asked.empty()) if (int code = submit(comm, asked)) fail(*comm, code, "the stream takes no work");
    return OK;
}
int ncclGroupStart() { ++depth; return begin(__func__); }
int ncclGroupEnd() {
    if (depth <= 0) return INVALID_USAGE;
    if (--depth) return OK;
    auto calls = std::move(grouped);
    grouped.clear();
    if (int code = begin(__func__)) return code;
    begin("groups");
    std::map<std::shared_ptr<Comm>, std::vector<Call>> by;
    for (auto &call : calls) by[call.first].push_back(call.second);
    bool waits = false;
    for (auto &group : by) {
        if (group.first->blocks) { if (int code = submit(group.first, group.second)) return code; continue; }
        Lock lock(group.first->mutex);
        if (!group.first->asked.empty()) return INVALID_USAGE; // the calls before were never taken
        group.first->asked = group.second;
        waits = true;
    }
    return waits ? IN_PROGRESS : OK;
}
int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return enqueue(SEND, comm, from, nullptr, count, type, 0, peer, stream);
}
int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return enqueue(RECV, comm, nullptr, to, count, type, 0, peer, stream);
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    return enqueue(ALL_REDUCE, comm, from, to, count, type, op, 0, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    return enqueue(BROADCAST, comm, from, to, count, type, 0, root, stream);
}
long fakenccl_count(const char *what) { Lock lock(world.mutex); return world.counts[what]; }
long fakenccl_alive(void) { Lock lock(world.mutex); return world.alive.size(); }
}
