#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| offbeat_tests::decoders::codec(bytes));
