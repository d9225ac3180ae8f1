const facts = JSON.parse(document.getElementById("facts").textContent);
