// Streams of the double: each is a thread that runs work in order, eagerly, lazily, or as it comes.
//
// CUDA promises nothing about when a stream runs, only what it waits for. FAKECUDA_SCHED=k walks through what that permits:
// the i-th stream (in the order of creation, modulo 8) is lazy if bit i of k is set, and runs a piece of work only when
// somebody waits for it; all others are eager, and have run it before the call returns, unless it waits itself. A wait that
// was forgotten shows for some k. Without the variable streams run as threads happen to. fakecuda_schedule(k) says so for the
// streams that are made from then on, of which the next one is the first.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

class Stream {
  public:
    explicit Stream(void *context) : context(context), lazy(next_is_lazy()), thread([this] { run(); }) {}

    ~Stream() {
        drain();
        {
            std::lock_guard<std::mutex> lock(mutex);
            stop = true;
        }
        wake.notify_all();
        thread.join();
    }

    // Enqueues work; gives its number.
    uint64_t push(std::function<void()> work) {
        std::unique_lock<std::mutex> lock(mutex);
        queue.push_back(std::move(work));
        const uint64_t number = submitted++;
        wake.notify_all();
        if (is_scheduled() && !lazy) changed.wait(lock, [&] { return waiting || done > number; });
        return number;
    }

    // Lets a lazy stream run all before this number.
    void demand(uint64_t end) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (end > demanded) demanded = end;
        }
        wake.notify_all();
    }

    // Waits until all work is done.
    void drain() {
        std::unique_lock<std::mutex> lock(mutex);
        demanded = submitted;
        wake.notify_all();
        changed.wait(lock, [&] { return done == submitted; });
    }

    // Whoever runs on a stream and waits for another one, or for a peer, says so: an eager stream need not be waited for.
    static void set_waiting(bool value) {
        if (Stream *stream = current()) {
            std::lock_guard<std::mutex> lock(stream->mutex);
            stream->waiting = value;
            stream->changed.notify_all();
        }
    }

    // What streams are like that are made from now on.
    static void set_schedule(long lazy) {
        schedule().lazy = lazy;
        schedule().made = 0;
        schedule().is_on = true;
    }

    void *const context;

  private:
    struct Schedule {
        std::atomic<bool> is_on{getenv("FAKECUDA_SCHED") != nullptr};
        std::atomic<long> lazy{setting("FAKECUDA_SCHED", 0)};
        std::atomic<int> made{0};
    };
    static Schedule &schedule() {
        static Schedule schedule;
        return schedule;
    }
    static bool is_scheduled() { return schedule().is_on; }
    static bool next_is_lazy() { return schedule().lazy >> (schedule().made++ % 8) & 1; }
    static Stream *&current() {
        static thread_local Stream *stream = nullptr;
        return stream;
    }

    void run() {
        current() = this;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return stop || (!queue.empty() && (!lazy || done < demanded)); });
            if (queue.empty()) return;
            auto work = std::move(queue.front());
            queue.pop_front();
            lock.unlock();
            work();
            work = nullptr;
            lock.lock();
            ++done;
            changed.notify_all();
        }
    }

    const bool lazy;
    std::mutex mutex;
    std::condition_variable wake, changed;
    std::deque<std::function<void()>> queue;
    uint64_t submitted = 0, done = 0, demanded = 0;
    bool stop = false, waiting = false;
    std::thread thread; // last: it runs at once
};

// A place in a stream, which an event marks each time it is recorded.
class Place {
  public:
    static std::shared_ptr<Place> record(Stream *stream) {
        auto place = std::make_shared<Place>();
        place->stream = stream;
        // known before the stream can have reached it: an eager one does so within push
        place->number = stream->push([place] { place->reach(); });
        place->known = true;
        return place;
    }

    void wait() {
        if (is_reached()) return;
        Stream::set_waiting(true);
        {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return reached; });
        }
        Stream::set_waiting(false);
    }

    bool is_reached() {
        std::lock_guard<std::mutex> lock(mutex);
        if (!reached && known) stream->demand(number + 1);
        return reached;
    }

  private:
    void reach() {
        std::lock_guard<std::mutex> lock(mutex);
        reached = true;
        changed.notify_all();
    }

    Stream *stream = nullptr;
    uint64_t number = 0;
    std::atomic<bool> known{false};
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
};
